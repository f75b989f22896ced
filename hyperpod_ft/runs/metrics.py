"""The rows of a run's metrics.jsonl."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """The intact rows, oldest first: a kill may have cut one short, a failing disk may have damaged one."""
    return filter(None, map(_row, _lines(path)))


def last_row(path: Path) -> dict[str, Any] | None:
    """The newest intact row; None when there is none."""
    return next(filter(None, map(_row, reversed(_lines(path)))), None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
