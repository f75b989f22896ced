"""Raw dataset files to raw rows: JSON Lines, JSON and parquet, in chunks that processes can read independently."""

import codecs
import json
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from hyperpod_ft.data import source_files
from hyperpod_ft.errors import UserError

CHUNK_BYTES = 256 << 10
_PARQUET_BATCH_ROWS = 1000  # fewer where rows hold files
_PARQUET_BATCH_BYTES = 32 << 20

_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class Chunk:
    """A part of one file. `start` and `stop` are bytes (`lines`) or row groups (`parquet`); `array` is a whole file."""

    file: str  # relative to the dataset's directory
    kind: Literal["lines", "array", "parquet"]
    start: int
    stop: int
    first: int  # number of its first line, or of its first row in a parquet file, from 1
    rows: tuple[int, int | None] = (0, None)  # which of its raw rows are read, from 0: from, up to but without


@dataclass(frozen=True)
class RawRow:
    """One JSON object. `where` is file:line."""

    where: str
    values: dict[str, Any]

    def folder(self, directory: Path) -> Path:
        """That of its file, in the dataset's directory."""
        return (directory / self.where.rpartition(":")[0]).parent


@dataclass(frozen=True)
class BadRow:
    """A raw row that cannot be used. Bad rows are counted by `reason`; `detail` describes this one."""

    where: str
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.where} ({self.reason}{': ' if self.detail else ''}{self.detail})"


def chunks(directory: Path) -> list[Chunk]:
    """Every data file below `directory`, in sorted order, cut into chunks. Hidden files are skipped.

    Raises UserError when there is none, or one of another type.
    """
    names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    found: list[Chunk] = []
    data_files = [name for name in names if not source_files.is_hidden(name) and not source_files.is_image(name)]
    for name in data_files:
        found.extend(chunks_of(directory, name))
    if not data_files:
        raise UserError(f"{directory}: has no data files", "correct dataset.files")
    return found


def chunks_of(directory: Path, name: str) -> Iterator[Chunk]:
    """One file below `directory`, cut into chunks as they are asked for. Raises UserError for one of another type."""
    path = directory / name
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        yield from _row_groups(path, name)
    elif suffix == ".json" and _first_character(path) == b"[":
        yield Chunk(name, "array", 0, path.stat().st_size, 1)
    elif suffix in (".json", ".jsonl", ".ndjson"):
        if suffix == ".json":
            _refuse_one_document(path, name)
        yield from _line_chunks(path, name)
    else:
        raise UserError(f"{name}: not a jsonl, json or parquet file", "correct dataset.files")


def _first_character(path: Path) -> bytes:
    with path.open("rb") as stream:
        while block := stream.read(4096):
            if stripped := block.removeprefix(codecs.BOM_UTF8).lstrip():
                return stripped[:1]
    return b""


def _refuse_one_document(path: Path, name: str) -> None:
    with path.open("rb") as stream:
        line = stream.readline().removeprefix(codecs.BOM_UTF8).strip()
    if line in (b"{", b""):
        raise UserError(f"{name}: neither a JSON array of rows nor one row per line", "convert it to JSON Lines")


def _line_chunks(path: Path, name: str) -> Iterator[Chunk]:
    start, line = 0, 1
    with path.open("rb") as stream:
        while block := stream.read(CHUNK_BYTES):
            block += stream.readline()
            yield Chunk(name, "lines", start, start + len(block), line)
            start += len(block)
            line += block.count(b"\n")


def _row_groups(path: Path, name: str) -> Iterator[Chunk]:
    from pyarrow import parquet  # type: ignore[import-untyped, unused-ignore]  # noqa: PLC0415 - slow to import

    try:
        metadata = parquet.read_metadata(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: not a parquet file: {error}", "fetch it again or correct dataset.files") from error
    first = 1
    for group in range(metadata.num_row_groups):
        yield Chunk(name, "parquet", group, group + 1, first)
        first += metadata.row_group(group).num_rows


def sliced(directory: Path, chunks: list[Chunk], split: str) -> list[Chunk]:
    """What `dataset.split` leaves of the chunks; a slice makes this count their raw rows. Raises UserError if none."""
    if "[" not in split:
        return chunks
    counts = [count(directory, chunk) for chunk in chunks]
    kept = source_files.rows_of(split, sum(counts))
    if not kept:
        raise UserError(f"dataset.split: {split} has none of the {sum(counts):,} raw rows", "choose other rows")
    found, before = [], 0
    for chunk, rows in zip(chunks, counts, strict=True):
        first, stop = max(kept.start - before, 0), min(kept.stop - before, rows)
        if first < stop:
            found.append(replace(chunk, rows=(first, stop)))
        before += rows
    return found


def count(directory: Path, chunk: Chunk) -> int:
    """How many raw rows a chunk has."""
    if chunk.kind == "lines":
        return sum(1 for _ in islice(_lines(directory / chunk.file, chunk), *chunk.rows))
    if chunk.kind == "array":
        return sum(1 for _ in read(directory, chunk))
    from pyarrow import parquet  # noqa: PLC0415

    there = int(parquet.read_metadata(directory / chunk.file).row_group(chunk.start).num_rows)
    return len(range(there)[slice(*chunk.rows)])


def read(directory: Path, chunk: Chunk, wanted: Container[int] | None = None) -> Iterator[RawRow | BadRow]:
    """The raw rows of one chunk in file order: all, or those at the places `wanted`, counted from 0 at `chunk.rows`.

    Raises UserError where the rest of a file cannot be read.
    """
    path = directory / chunk.file
    if chunk.kind == "lines":
        lines = islice(_lines(path, chunk), *chunk.rows)
        kept = (line for place, line in enumerate(lines) if wanted is None or place in wanted)
        return (_parse(f"{chunk.file}:{number}", line) for number, line in kept)
    rows = islice(_read_array(path, chunk) if chunk.kind == "array" else _read_parquet(path, chunk), *chunk.rows)
    return rows if wanted is None else (row for place, row in enumerate(rows) if place in wanted)


def _lines(path: Path, chunk: Chunk) -> Iterator[tuple[int, bytes]]:
    """Each line that is not blank, with its number."""
    with path.open("rb") as stream:
        stream.seek(chunk.start)
        block = stream.read(chunk.stop - chunk.start)
    if chunk.start == 0:
        block = block.removeprefix(codecs.BOM_UTF8)
    return ((number, line) for number, line in enumerate(block.split(b"\n"), chunk.first) if line.strip())


def _parse(where: str, line: bytes) -> RawRow | BadRow:
    try:
        return _row(where, json.loads(line.decode("utf-8")))
    except UnicodeDecodeError as error:
        return BadRow(where, "invalid UTF-8", f"byte {error.start + 1} of the line")
    except json.JSONDecodeError as error:
        return BadRow(where, "invalid JSON", f"{error.msg}, column {error.colno}")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        return BadRow(where, "invalid JSON", str(error).split(";", maxsplit=1)[0])


def _row(where: str, value: Any) -> RawRow | BadRow:
    if not isinstance(value, dict):
        return BadRow(where, "not a JSON object", f"a {type(value).__name__}")
    return RawRow(where, value)


def _read_array(path: Path, chunk: Chunk) -> Iterator[RawRow | BadRow]:
    # Undecodable bytes become lone surrogates, which `prompts.check_unicode` finds in the row later.
    text = path.read_bytes().decode("utf-8-sig", errors="surrogateescape")
    decoder = json.JSONDecoder()
    position, line = _skip_space(text, text.index("[") + 1), 1
    counted = 0
    while not text.startswith("]", position):
        line += text.count("\n", counted, position)
        counted = position
        where = f"{chunk.file}:{line}"
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: invalid JSON: {error}", "correct the file") from error
        yield _row(where, value)
        position = _skip_space(text, position)
        if text.startswith(",", position):
            position = _skip_space(text, position + 1)
        elif not text.startswith("]", position):
            raise UserError(f"{where}: the array ends early or lacks a comma after this row", "correct the file")


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _read_parquet(path: Path, chunk: Chunk) -> Iterator[RawRow | BadRow]:
    from pyarrow import parquet  # noqa: PLC0415

    number = chunk.first
    # No threads: this may run in a forked process, and there is already one process per CPU.
    try:
        with parquet.ParquetFile(path, pre_buffer=False) as file:
            group = file.metadata.row_group(chunk.start)
            fitting = _PARQUET_BATCH_BYTES * group.num_rows // max(1, group.total_byte_size)
            rows = max(1, min(_PARQUET_BATCH_ROWS, fitting))
            for batch in file.iter_batches(rows, row_groups=[chunk.start], use_threads=False):
                for offset, values in enumerate(_values(batch)):
                    where = f"{chunk.file}:{number + offset}"
                    yield BadRow(where, "invalid UTF-8") if values is None else RawRow(where, values)
                number += batch.num_rows
    except (OSError, ValueError) as error:
        raise UserError(f"{chunk.file}: cannot read the rest of it: {error}", "fetch it again") from error


def _values(batch: Any) -> list[dict[str, Any] | None]:
    try:
        return [{name: _without_nulls(value) for name, value in row.items()} for row in batch.to_pylist()]
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [None]
        return [row for index in range(batch.num_rows) for row in _values(batch.slice(index, 1))]  # find it


def _without_nulls(value: Any) -> Any:
    """A value whose objects lack the keys that are null: a struct of parquet has those of all rows."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
