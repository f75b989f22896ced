"""What is published about a run: each row of metrics.jsonl, the run file, and the final figures; and how far a tracker
got with it: a small file for each tracker, in the run's directory.
"""

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from hyperpod_ft import publish
from hyperpod_ft.config import yaml_text
from hyperpod_ft.config.fields import flattened
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.results.metrics import GrowingRows
from hyperpod_ft.runs.results.training_summary import summary_of
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import RunPaths
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


@dataclass(frozen=True)
class TrackerState:
    """What a tracker has of a training run.

    `key` names the training there, the same for every follower. It is new when the training was forced to start again,
    because that moves the files of its earlier attempts away.
    """

    key: str
    step: int = 0  # the newest that was published
    final: dict[str, float] = field(default_factory=dict)  # the final figures that were published
    where: str = ""  # the run in the tracker, for people: a URL or a directory
    problem: str = ""  # why the tracker was not reached last time

    @classmethod
    def read(cls, run: Run, tracker: str) -> "TrackerState":
        """The state in the run's directory; without a file a new one, which nothing was published under.

        Raises OSError and UserError when the file cannot be read: a new key would publish the training twice.
        """
        path = _path(run.paths, tracker)
        try:
            return _STATE.validate_json(path.read_bytes())
        except FileNotFoundError:
            return cls(f"{run.plan.run_id}-{secrets.token_hex(3)}")
        except ValueError as error:
            raise UserError(f"{path}: is damaged", "remove it to publish the training again, as another run") from error

    def write(self, run: Run, tracker: str) -> None:
        publish.write_json(_path(run.paths, tracker), asdict(self))


_STATE = TypeAdapter(TrackerState)


def _path(paths: RunPaths, tracker: str) -> Path:
    return paths.tracking / f"{tracker}.json"
