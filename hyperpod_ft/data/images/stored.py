"""The images of a prepared dataset, and the text of the rows that have them: all that training needs.

images.bin             the files of all images, one after another, each once
train/images.jsonl     for each row: prompt, completion, and where its images are in images.bin
validation/images.jsonl
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

_FILES = "images.bin"
_ROWS = "images.jsonl"

Span = Sequence[int]
"""The first byte of an image in images.bin, and the one after its last."""


@dataclass(frozen=True)
class ImageRow:
    """A row as text; an image is written as the chat template does, not yet as its tokens."""

    prompt: str
    completion: str
    images: Sequence[Span]


class StoringImages:
    """Writes the files of images."""

    def __init__(self, directory: Path) -> None:
        self._stream = (directory / _FILES).open("wb")
        self._known: dict[bytes, Span] = {}
        self._end = 0

    def add(self, images: Iterable[bytes]) -> list[Span]:
        """Where they are; one that was added before is not written again."""
        return [self._one(file) for file in images]

    def close(self) -> int:
        """How many images there are."""
        self._stream.close()
        return len(self._known)

    def _one(self, file: bytes) -> Span:
        digest = xxhash.xxh3_128_digest(file)
        if digest not in self._known:
            self._stream.write(file)
            self._known[digest] = (self._end, self._end + len(file))
            self._end += len(file)
        return self._known[digest]


def write_rows(directory: Path, rows: Iterable[ImageRow]) -> None:
    """Write the text of a split's rows beside their arrays."""
    with (directory / _ROWS).open("w", encoding="ascii") as stream:
        for row in rows:
            stream.write(json.dumps(asdict(row)) + "\n")


class ImageRows:
    """The text of a split's rows, in their order, and their images."""

    def __init__(self, directory: Path) -> None:
        # JSON strings may contain Unicode line breaks: lines end at \n only
        self._lines = (directory / _ROWS).read_bytes().split(b"\n")[:-1]
        self._dataset = directory.parent

    def __getitem__(self, row: int) -> tuple[ImageRow, list[bytes]]:
        found = ImageRow(**json.loads(self._lines[row]))
        return found, read(self._dataset, found.images)


def read(dataset: Path, images: Iterable[Span]) -> list[bytes]:
    """The files of images in a prepared dataset."""
    with (dataset / _FILES).open("rb") as stream:
        return [os.pread(stream.fileno(), end - start, start) for start, end in images]
