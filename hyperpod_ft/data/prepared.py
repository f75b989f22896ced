"""The prepared dataset on disk: packed rows as plain .npy files, sampled examples as text, and the report."""

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hyperpod_ft import publish
from hyperpod_ft.data.example import Example
from hyperpod_ft.data.packing import PackedRows
from hyperpod_ft.errors import UserError

SplitName = Literal["train", "validation"]

_ARRAYS = ("input_ids", "labels", "position_ids")
_SAMPLES = "samples.jsonl"
_REPORT = "report.json"


@dataclass(frozen=True)
class Sample:
    """One example as text, for comparing a model's answer with the expected one."""

    split: SplitName
    prompt: str
    completion: str
    templated: bool = False  # a chat template wrote the prompt, with its special tokens

    @classmethod
    def of(cls, split: SplitName, example: Example) -> "Sample":
        return cls(split, example.prompt, example.completion, example.templated)


@dataclass(frozen=True)
class Split:
    """Packed rows, memory-mapped: each int32 [rows, max_length].

    `labels` are in their token's column (not shifted), -100 where there is no loss. `position_ids` restart at 0 with
    each document, and with the padding: no attention across a 0.
    """

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    position_ids: NDArray[np.int32]

    @classmethod
    def open(cls, directory: Path) -> "Split":
        """Raises UserError when the arrays are missing, damaged or of different shapes."""
        remedy = "run: hyperpod-ft submit --only dataset --force"
        try:
            arrays = [np.load(directory / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS]
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{directory}: cannot read the rows: {error}", remedy) from error
        shapes = {array.shape for array in arrays}
        if len(shapes) != 1 or arrays[0].ndim != 2:
            raise UserError(f"{directory}: the arrays have different shapes {sorted(shapes)}", remedy)
        return cls(*arrays)

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class Prepared:
    """A prepared dataset's directory."""

    directory: Path

    @classmethod
    def open(cls, directory: Path) -> "Prepared":
        """Raises UserError when the directory is not a prepared dataset."""
        if not (directory / _REPORT).is_file():
            raise UserError(f"{directory}: not a prepared dataset", "run: hyperpod-ft submit --only dataset")
        return cls(directory)

    def split(self, name: SplitName) -> Split | None:
        """The rows of a split; None if it has none. Raises UserError when they are damaged."""
        if not (self.directory / name).is_dir():
            return None
        return Split.open(self.directory / name)

    def samples(self, split: SplitName) -> list[Sample]:
        """Examples of a split in an order drawn once: the first k are a random sample."""
        lines = (self.directory / _SAMPLES).read_text(encoding="utf-8").split("\n")
        samples = [Sample(**json.loads(line)) for line in lines if line]
        return [sample for sample in samples if sample.split == split]

    def report(self) -> dict[str, Any]:
        """`report.json`; its keys are the fields of `data.report.DatasetReport`."""
        return dict(json.loads((self.directory / _REPORT).read_text(encoding="utf-8")))


def write_split(
    directory: Path, name: SplitName, blocks: Iterable[PackedRows], row_count: int, max_length: int
) -> None:
    """Write a split's arrays block by block, with one block in memory; nothing if there are no rows."""
    if not row_count:
        return
    (directory / name).mkdir()
    header = {"descr": "<i4", "fortran_order": False, "shape": (row_count, max_length)}
    with contextlib.ExitStack() as stack:
        # written, not mapped: on a full volume a write raises an error, but a mapping gets a signal
        streams = {array: stack.enter_context((directory / name / f"{array}.npy").open("wb")) for array in _ARRAYS}
        for stream in streams.values():
            np.lib.format.write_array_header_1_0(stream, header)  # type: ignore[no-untyped-call,unused-ignore]  # typed since numpy 2.3
        for block in blocks:
            for array, stream in streams.items():
                stream.write(np.ascontiguousarray(getattr(block, array), "<i4").data)


def write_samples(directory: Path, samples: Iterable[Sample]) -> None:
    # JSON strings may contain Unicode line breaks: readers split at \n only.
    text = "".join(json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in samples)
    (directory / _SAMPLES).write_text(text, encoding="utf-8")


def write_report(directory: Path, report: dict[str, Any]) -> None:
    publish.write_json(directory / _REPORT, report)


def blocks_of(row_count: int, rows: int) -> Iterator[tuple[int, int]]:
    """Consecutive ranges of at most `rows` that cover `row_count`."""
    for first in range(0, row_count, rows):
        yield first, min(first + rows, row_count)
