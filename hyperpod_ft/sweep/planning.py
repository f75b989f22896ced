"""A sweep file to a sweep: the run of every point, all of them validated before anything is written; or to the sweep
that was made of it.
"""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ft.config import run_file
from hyperpod_ft.download.assets import ensure_model_config
from hyperpod_ft.errors import ConfigError, UserError
from hyperpod_ft.launch.preflight import check_run
from hyperpod_ft.runs.references import last_directory
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sweep import sweep_file
from hyperpod_ft.sweep.sweep import Point, Sweep
from hyperpod_ft.sweep.sweep_file import Settings

_LISTED = 20  # problems


@dataclass(frozen=True)
class PlannedSweep:
    """A sweep, and the run of each of its points."""

    sweep: Sweep
    runs: tuple[Run, ...]


def plan_sweep(path: Path, launcher: str) -> PlannedSweep:
    """The sweep of a sweep file. Writes nothing but the config.json of models whose degrees are to be chosen.

    Raises ConfigError with a line for each problem of a point, and UserError for two points with the same training.
    """
    file = sweep_file.load(path)
    base = sweep_file.base_of(file, path.resolve().parent)
    points = list(sweep_file.expand(file))
    runs = _runs(path, base, points)
    _refuse_equal(path, runs)
    shown = str(base.resolve()) if base.parent != run_file.RECIPES else base.stem
    known = tuple(
        Point(
            settings,
            run.paths.full_name,
            shlex.join([shown, *(f"--set={one}" for one in sweep_file.overrides(settings))]),
        )
        for settings, run in zip(points, runs, strict=True)
    )
    return PlannedSweep(Sweep(runs[0].paths.root, file.name, file.runs_at_a_time, launcher, known), tuple(runs))


def sweep_directory(path: Path) -> Path:
    """The directory of a sweep file's sweep. Raises UserError as `plan_sweep` does, for its first point only."""
    file = sweep_file.load(path)
    base = sweep_file.base_of(file, path.resolve().parent)
    first = run_file.load(base, sweep_file.overrides(next(sweep_file.expand(file))))
    return first.root / "sweeps" / file.name


def _runs(path: Path, base: Path, points: Iterable[Settings]) -> list[Run]:
    """The run of each point, checked as far as this machine can see."""
    runs: list[Run] = []
    problems: dict[str, str] = {}  # with the first point that has it
    for number, settings in enumerate(points, 1):
        try:
            config = run_file.load(base, sweep_file.overrides(settings))
            ensure_model_config(config)
            run = Run.of(config)
            check_run(run)
            runs.append(run)
        except UserError as error:
            for line in str(error).splitlines():
                problems.setdefault(line, f"{path}: point {number}: {line}")
    if problems:
        listed = list(problems.values())
        more = [f"{path}: {len(listed) - _LISTED:,} more problems; correct these first"][: len(listed) > _LISTED]
        raise ConfigError([*listed[:_LISTED], *more])
    return runs


def _refuse_equal(path: Path, runs: list[Run]) -> None:
    first: dict[Path, int] = {}
    for number, run in enumerate(runs, 1):
        if run.paths.directory in first:
            raise UserError(
                f"{path}: points {first[run.paths.directory]} and {number} are one run, {run.paths.full_name}:"
                " their training is the same",
                "give each point another value of a key that changes the training",
            )
        first[run.paths.directory] = number


def find_sweep(reference: str | None) -> Sweep:
    """The sweep that an argument means: a sweep file, the directory of a sweep, or None, the sweep submitted last.

    Raises UserError when it was not submitted.
    """
    if reference is None:
        return Sweep.open(last_directory("sweep"))
    path = Path(reference)
    if path.is_dir():
        return Sweep.open(path)
    directory = sweep_directory(path)
    if not (directory / "sweep.json").exists():
        raise UserError(f"{reference}: this sweep has not been submitted", f"hyperpod-ft sweep {reference}")
    return Sweep.open(directory)
