"""The prepared dataset on disk: packed rows as plain .npy files, sampled examples as text, and the report."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from hyperpod_ft import publish
from hyperpod_ft.data.images import stored
from hyperpod_ft.data.images.stored import Span
from hyperpod_ft.data.mixing import source_report
from hyperpod_ft.data.mixing.mixture import spread
from hyperpod_ft.data.packing import PackedRows
from hyperpod_ft.data.seq2seq.packing import Seq2SeqRows
from hyperpod_ft.data.text.example import Example
from hyperpod_ft.errors import UserError

SplitName = Literal["train", "validation"]

_DECODER = "decoder_input_ids"
_SAMPLES = "samples.jsonl"
_PROMPTS = "prompts.jsonl"
_DESIRABLE = "desirable.npy"
_REPORT = "report.json"
_OPTIONAL = ("source", "images", "image_names")  # of a sample
_REMEDY = "run: hyperpod-ft submit RUN_FILE --only dataset --force"


@dataclass(frozen=True)
class Sample:
    """One example as text, for comparing a model's answer with the expected one."""

    split: SplitName
    prompt: str
    completion: str
    templated: bool = False  # a chat template wrote the prompt, with its special tokens
    source: str = ""  # the name of its source, of several
    images: Sequence[Span] = ()  # where they are in the prepared dataset
    image_names: Sequence[str] = ()  # of their files in the raw one; empty for those that its rows contain

    @classmethod
    def of(cls, split: SplitName, example: Example, source: str = "", images: Sequence[Span] = ()) -> "Sample":
        text = example.prompt, example.completion, example.templated
        return cls(split, *text, source, images, example.image_names if images else ())

    def as_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value or key not in _OPTIONAL}


@dataclass(frozen=True)
class Prompt:
    """A row of format `prompt` as text.

    `templated`: a chat template wrote it, with its special tokens; `columns`: the other ones of its raw row; `where`:
    file and line of that.
    """

    text: str
    templated: bool
    columns: dict[str, Any]
    where: str


class Prompts:
    """The prompts of a split, in the order of its rows."""

    def __init__(self, directory: Path) -> None:
        # JSON strings may contain Unicode line breaks: lines end at \n only
        self._lines = (directory / _PROMPTS).read_bytes().split(b"\n")[:-1]

    def __getitem__(self, row: int) -> Prompt:
        return Prompt(**json.loads(self._lines[row]))

    def __iter__(self) -> Iterator[Prompt]:
        return (self[row] for row in range(len(self._lines)))


def open_split(directory: Path) -> PackedRows | Seq2SeqRows:
    """Memory-mapped rows of `directory`. Raises UserError when arrays are missing, damaged or of different shapes."""
    kind: type[PackedRows | Seq2SeqRows] = Seq2SeqRows if (directory / f"{_DECODER}.npy").exists() else PackedRows
    names = [field.name for field in fields(kind)]
    try:
        arrays = [np.load(directory / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names]
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{directory}: cannot read the rows: {error}", _REMEDY) from error
    parts = [arrays] if kind is PackedRows else [arrays[:2], arrays[2:]]
    shapes = [{array.shape for array in part} for part in parts]
    if (
        any(len(found) != 1 for found in shapes)
        or any(array.ndim != 2 for array in arrays)
        or len({len(array) for array in arrays}) != 1
    ):
        found_shapes = sorted(set().union(*shapes))
        raise UserError(f"{directory}: the arrays have different shapes {found_shapes}", _REMEDY)
    return kind(*arrays)


def open_labels(directory: Path) -> NDArray[np.bool_] | None:
    """Whether each row's completion is desirable, bool [rows]; None where rows have no labels.

    Raises UserError when the file is damaged.
    """
    path = directory / _DESIRABLE
    try:
        return np.asarray(np.load(path, allow_pickle=False), np.bool_) if path.exists() else None
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path}: cannot be read: {error}", _REMEDY) from error


@dataclass(frozen=True)
class PreparedDataset:
    """A prepared dataset's directory."""

    directory: Path

    @classmethod
    def open(cls, directory: Path) -> "PreparedDataset":
        """Raises UserError when the directory is not a prepared dataset."""
        if not (directory / _REPORT).is_file():
            raise UserError(f"{directory}: not a prepared dataset", "run: hyperpod-ft submit RUN_FILE --only dataset")
        return cls(directory)

    def split(self, name: SplitName) -> PackedRows | Seq2SeqRows | None:
        """The rows of a split; None if it has none. Raises UserError when they are damaged."""
        if not (self.directory / name).is_dir():
            return None
        return open_split(self.directory / name)

    def validation_sources(self) -> dict[str, NDArray[np.int64]]:
        """The numbers of the validation rows of each source that has some, by name; empty if that is one alone."""
        rows = {source.name: source.validation_rows for source in source_report.read(self.report())}
        held_out = {name: count for name, count in rows.items() if count}
        source_of = spread([*held_out.values()])
        found = {name: np.flatnonzero(source_of == number) for number, name in enumerate(held_out)}
        return found if len(found) > 1 else {}

    def samples(self, split: SplitName) -> list[Sample]:
        """Examples of a split in an order drawn once: the first k are a random sample."""
        lines = (self.directory / _SAMPLES).read_text(encoding="utf-8").split("\n")
        samples = [Sample(**json.loads(line)) for line in lines if line]
        return [sample for sample in samples if sample.split == split]

    def images(self, sample: Sample) -> list[bytes]:
        """The files of a sample's images."""
        return stored.read(self.directory, sample.images) if sample.images else []

    def report(self) -> dict[str, Any]:
        """`report.json`; its keys are the fields of `data.report.DatasetReport`."""
        return dict(json.loads((self.directory / _REPORT).read_text(encoding="utf-8")))


def write_split(directory: Path, name: SplitName, blocks: Iterable[PackedRows | Seq2SeqRows], row_count: int) -> None:
    """Write a split's arrays block by block, with one block in memory; nothing if there are no rows."""
    if not row_count:
        return
    (directory / name).mkdir()
    with contextlib.ExitStack() as stack:
        streams: dict[str, IO[bytes]] = {}
        for block in blocks:
            for array, rows in vars(block).items():
                if array not in streams:
                    # written, not mapped: on a full volume a write raises an error, but a mapping gets a signal
                    streams[array] = stack.enter_context((directory / name / f"{array}.npy").open("wb"))
                    header = {"descr": "<i4", "fortran_order": False, "shape": (row_count, rows.shape[1])}
                    np.lib.format.write_array_header_1_0(streams[array], header)  # type: ignore[no-untyped-call,unused-ignore]  # typed since numpy 2.3
                streams[array].write(np.ascontiguousarray(rows, "<i4").data)


def write_prompts(directory: Path, name: SplitName, prompts: Iterable[Prompt]) -> None:
    """Write the prompts of a split's rows beside their arrays. Values that JSON has not, such as dates, become text."""
    with (directory / name / _PROMPTS).open("w", encoding="ascii") as stream:  # columns may have lone surrogates
        for prompt in prompts:
            stream.write(json.dumps(asdict(prompt), default=str) + "\n")


def write_labels(directory: Path, name: SplitName, desirable: NDArray[np.bool_]) -> None:
    """Write whether each completion of a split's rows, one a row, is desirable, beside their arrays."""
    np.save(directory / name / _DESIRABLE, desirable)


def write_samples(directory: Path, samples: Iterable[Sample]) -> None:
    # JSON strings may contain Unicode line breaks: readers split at \n only.
    text = "".join(json.dumps(sample.as_dict(), ensure_ascii=False) + "\n" for sample in samples)
    (directory / _SAMPLES).write_text(text, encoding="utf-8")


def write_report(directory: Path, report: dict[str, Any]) -> None:
    publish.write_json(directory / _REPORT, report)


def blocks_of(row_count: int, rows: int) -> Iterator[tuple[int, int]]:
    """Consecutive ranges of at most `rows` that cover `row_count`."""
    for first in range(0, row_count, rows):
        yield first, min(first + rows, row_count)
