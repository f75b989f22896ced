"""The images of a prepared dataset, and the text of the rows that have them: all that training needs.

images.bin           the files of all images, one after another, each once
train/images.jsonl   for each example: prompt, completion, and where its images are in images.bin
train/images.npy     int64 [rows, 2]: the first byte of each row's line in images.jsonl, and the one after its last
validation/          the same
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyperpod_ft.data.images import FILES
from hyperpod_ft.errors import UserError

_ROWS = "images.jsonl"
_PLACES = "images.npy"

Span = tuple[int, int, str]
"""The first byte of an image in images.bin, the one after its last, and its digest.

Each is checked when it is read: all of them may take longer to read than a job may hold accelerators for it.
"""


@dataclass(frozen=True)
class ImageRow:
    """A row as text; an image is written as the chat template does, not yet as its tokens."""

    prompt: str
    completion: str
    images: Sequence[Span]


class StoringImages:
    """Writes the files of images."""

    def __init__(self, directory: Path) -> None:
        self._stream = (directory / FILES).open("wb")
        self._known: dict[str, Span] = {}
        self._end = 0

    def add(self, images: Iterable[bytes]) -> list[Span]:
        """Where they are; one that was added before is not written again."""
        return [self._one(file) for file in images]

    def close(self) -> int:
        """How many images there are."""
        self._stream.close()
        return len(self._known)

    def _one(self, file: bytes) -> Span:
        digest = _digest(file)
        if digest not in self._known:
            self._stream.write(file)
            self._known[digest] = (self._end, self._end + len(file), digest)
            self._end += len(file)
        return self._known[digest]


def write_rows(directory: Path, examples: Iterable[ImageRow], order: NDArray[np.int64]) -> None:
    """Write the text of a split's rows beside their arrays; `order`: which example each row is, int64 [rows]."""
    ends = [0]
    with (directory / _ROWS).open("wb") as stream:
        for example in examples:
            ends.append(ends[-1] + stream.write(json.dumps(asdict(example)).encode() + b"\n"))
    np.save(directory / _PLACES, np.array([*pairwise(ends)], np.int64)[order])


class ImageRows:
    """The text of a split's rows, in their order, and their images."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._places: NDArray[np.int64] = np.load(directory / _PLACES, mmap_mode="r", allow_pickle=False)

    def __getitem__(self, row: int) -> tuple[ImageRow, list[bytes]]:
        """Raises UserError for images that have changed."""
        found = self.row(row)
        return found, read(self._directory.parent, found.images)

    def row(self, row: int) -> ImageRow:
        start, end = self._places[row].tolist()
        with (self._directory / _ROWS).open("rb") as stream:
            return ImageRow(**json.loads(os.pread(stream.fileno(), end - start, start)))


def read(dataset: Path, images: Iterable[Span]) -> list[bytes]:
    """The files of images in a prepared dataset. Raises UserError for those that have changed."""
    path, found = dataset / FILES, []
    with path.open("rb") as stream:
        for start, end, digest in images:
            found.append(file := os.pread(stream.fileno(), end - start, start))
            if _digest(file) != digest:
                raise UserError(
                    f"{path}: differs from what stage dataset wrote",
                    "run: hyperpod-ft submit RUN_FILE --only dataset --force",
                )
    return found


def _digest(file: bytes) -> str:
    import xxhash  # noqa: PLC0415 - an endpoint's image may lack it

    return xxhash.xxh3_128_hexdigest(file)
