"""The rows of a run's metrics.jsonl."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def intact_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines that are valid rows, each with its row, oldest first; none without the file.

    A kill may have truncated a line, a failing disk damaged one. Raises OSError when the file cannot be read.
    """
    for line in _lines(path):
        if row := _row(line):
            yield line, row


def last_row(path: Path) -> dict[str, Any] | None:
    """The newest intact row; None when there is none, or the file cannot be read."""
    try:
        return next(filter(None, map(_row, reversed(_lines(path)))), None)
    except OSError:
        return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
