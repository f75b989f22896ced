"""The rows of a run's metrics.jsonl."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hyperpod_ft.runs.results.log_text import growing_tails

OF_SOURCE = "validation_loss/"  # begins the keys of validation losses over one source, whose name follows
# keys of the ROUGE of answers to validation samples, with their names
ROUGE = {"validation_rouge_1": "ROUGE-1", "validation_rouge_2": "ROUGE-2", "validation_rouge_l": "ROUGE-L"}
_TOO_LARGE = 1 << 63  # no count, and much above it no number that a float holds
_TAIL_BYTES = 1 << 14  # some dozens of rows


def intact_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines that are valid rows, each with its row, oldest first; none without the file.

    A kill may have truncated a line, a failing disk damaged one. Raises OSError when the file cannot be read.
    """
    for line in _lines(path):
        if row := _row_of(line):
            yield line, row


class GrowingRows:
    """The intact rows of a file that grows, and that is replaced when training resumes from a checkpoint."""

    def __init__(self, path: Path) -> None:
        self._path, self._inode, self._offset = path, 0, 0

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """The rows added since the last call, and whether the file is another one, so that these are all of its rows.

        None without the file. A line that is still being written is left for the next call. Raises OSError when the
        file cannot be read; the next call then reads the same rows.
        """
        try:
            with self._path.open("rb") as stream:
                status = os.fstat(stream.fileno())
                replaced = status.st_ino != self._inode or status.st_size < self._offset
                begin = stream.seek(0 if replaced else self._offset)
                content = stream.read()
        except FileNotFoundError:
            return [], False
        whole = content[: content.rfind(b"\n") + 1]
        self._inode, self._offset = status.st_ino, begin + len(whole)
        lines = whole.decode("utf-8", "replace").splitlines()
        return [row for line in lines if (row := _row_of(line))], replaced


def last_row(path: Path) -> dict[str, Any] | None:
    """The newest intact row; None if the file has none or cannot be read."""
    try:
        for text in growing_tails(path, _TAIL_BYTES):
            # a first line without its beginning is not valid JSON
            if row := next(filter(None, map(_row_of, reversed(text.splitlines()))), None):
                return row
    except OSError:
        pass
    return None


def last_step(path: Path) -> int:
    """The step of the newest intact row, or 0 without one."""
    row = last_row(path)
    return int(row["step"]) if row else 0


def _row_of(line: str) -> dict[str, Any] | None:
    """The row in a line; None for a line that is not intact."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    return row if all(value is None or is_number(value) for value in row.values()) else None


def is_number(value: object) -> bool:
    """Whether a value is a number that can be computed with, and written out."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < _TOO_LARGE)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
