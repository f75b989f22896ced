"""The sweep file: a run file, and the settings of each point. `expand` is pure: the points of a file."""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from hyperpod_ft.config import run_file, yaml_file
from hyperpod_ft.config.fields import PositiveInt, Section, matches, shortened
from hyperpod_ft.config.yaml_file import FileKind

MAX_POINTS = 1000
Settings = dict[str, Any]
"""Values by key of the run file, such as `training.learning_rate`."""


class SweepFile(Section):
    """One sweep file."""

    name: Annotated[
        str, matches(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "at most 64 letters, digits, dots, underscores and hyphens")
    ] = Field(description="Name of the sweep; a directory below `sweeps/` of cluster.root.")
    run: str = Field(description="Run file, relative to this file's directory, or the name of a packaged recipe.")
    runs_at_a_time: PositiveInt | None = Field(None, description="How many runs may train at a time.")
    grid: dict[str, tuple[Any, ...]] = Field(default_factory=dict, description="Values of keys, in all combinations.")
    points: tuple[Settings, ...] = Field((), alias="list", description="Settings of one point each.")

    @field_validator("grid")
    @classmethod
    def _values_differ(cls, grid: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        for key, values in grid.items():
            if not values:
                raise ValueError(f"{shortened(key)} has no values")
        return grid

    @model_validator(mode="after")
    def _has_points(self) -> "SweepFile":
        if not self.grid and not self.points:
            raise ValueError("has neither grid nor list; add one of them")
        for key in {*self.grid, *(key for point in self.points for key in point)}:
            if not all(key.split(".")):
                raise ValueError(f"{shortened(key)} is not a key; write it as section.key")
            if key == "cluster.root":
                raise ValueError("cluster.root must be the same for all points; set it in the run file")
        if both := self.grid.keys() & {key for point in self.points for key in point}:
            raise ValueError(f"{', '.join(sorted(both))}: in grid and in list; give it in one of them")
        count = math.prod(len(values) for values in self.grid.values()) * (len(self.points) or 1)
        if count > MAX_POINTS:
            raise ValueError(f"has {count:,} points; at most {MAX_POINTS:,} are allowed")
        return self


SWEEP_FILE = FileKind(SweepFile, "docs/stages.md", "docs/stages.md")


def load(path: Path) -> SweepFile:
    """Read and validate a sweep file. Raises UserError or ConfigError."""
    return yaml_file.validate(SWEEP_FILE, yaml_file.parse(SWEEP_FILE, path), str(path))


def expand(file: SweepFile) -> Iterator[Settings]:
    """The settings of each point: every entry of `list` with every combination of `grid`, the last key fastest."""
    for listed in file.points or ({},):
        for values in itertools.product(*file.grid.values()):
            yield {**listed, **dict(zip(file.grid, values, strict=True))}


def base_of(file: SweepFile, directory: Path) -> Path:
    """The path of the run file that a sweep file in `directory` names. Raises UserError when there is none."""
    beside = directory / file.run
    return beside if beside.is_file() else run_file.find(file.run)


def overrides(settings: Settings) -> list[str]:
    """The settings as arguments of --set."""
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()]
