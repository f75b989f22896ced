"""What is published about a run: each row of metrics.jsonl, the run file, and the final figures."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hyperpod_ft.config import yaml_text
from hyperpod_ft.config.fields import flattened
from hyperpod_ft.runs.results.metrics import GrowingRows
from hyperpod_ft.runs.results.training_summary import summary_of
from hyperpod_ft.runs.run import Run
from hyperpod_ft.tracking.trackers.interface import FINAL, Row


def description(run: Run, key: str) -> dict[str, Any]:
    """What a tracker is given when it is opened: names, and the run file's settings as `section.key`."""
    return {
        "key": key,
        "project": run.config.tracking.project or run.config.name,
        "name": run.paths.full_name,
        "config": run.config.by_key(),
        "yaml": yaml_text.dump(run.config),
        "directory": str(run.paths.tracking),
        "root": str(run.paths.root),
    }


def final(run: Run) -> Row:
    """The numbers of `compare`, as `final/<name>`; none before the training is done."""
    summary = summary_of(run)
    if summary is None:
        return {}
    values = flattened(asdict(summary), separator="/")
    return {f"{FINAL}{name}": float(value) for name, value in values.items() if _is_number(value)}


class NewRows:
    """The rows of metrics.jsonl that are to be published. Each call of `after` reads what was added since the last."""

    def __init__(self, path: Path) -> None:
        self._growing = GrowingRows(path)
        self._rows: list[dict[str, Any]] = []

    def after(self, step: int) -> list[Row]:
        """The rows of later steps, ascending. Raises OSError when the file cannot be read."""
        added, replaced = self._growing.read()
        known = [] if replaced else self._rows
        # of a step that is there twice, after a kill between two writers, the first counts, as it was published
        self._rows = [row for row in [*known, *added] if row["step"] > step]
        return [points(row) for row in _by_step(self._rows)]


def points(row: Mapping[str, Any]) -> Row:
    """A row's numbers by name, `step` among them."""
    return {name: float(value) if name != "step" else value for name, value in row.items() if _is_number(value)}


def _by_step(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first: dict[int, dict[str, Any]] = {}
    for row in rows:
        first.setdefault(row["step"], row)
    return [first[step] for step in sorted(first)]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
