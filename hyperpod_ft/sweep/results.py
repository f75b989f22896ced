"""The state of a sweep: of each point its run's state and validation loss, and which one is best."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hyperpod_ft.config.fields import shortened
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.status import RunStatus, statuses_of
from hyperpod_ft.report.gather import gather
from hyperpod_ft.report.run_report import RunReport
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sweep.sweep import Point, Sweep
from hyperpod_ft.sweep.sweep_file import Settings


@dataclass(frozen=True)
class PointResult:
    """A sweep point and its run's progress."""

    number: int  # from 1
    settings: Settings
    run: str  # name/id
    directory: str
    state: str
    detail: str  # the stage that failed or is at work, or why there is no state
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None  # of the newest step, or the final one
    validation_loss: float | None = None  # of the weights that the tuned model is made from


@dataclass(frozen=True)
class SweepResult:
    """The state of a sweep."""

    name: str
    directory: str
    runs_at_a_time: int | None
    keys: tuple[str, ...]  # that its points set
    points: tuple[PointResult, ...]
    best: int | None  # number of the point with the lowest validation loss, if they can be compared
    note: str  # why they cannot

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def failed(self) -> bool:
        return any(point.state == "failed" for point in self.points)


def sweep_result(sweep: Sweep, launchers: Launchers) -> SweepResult:
    """Asks the launchers of the runs. A run that was deleted is `unknown`."""
    runs = [sweep.open_if_intact(point) for point in sweep.points]
    statuses = {current.directory: current for current in statuses_of([run for run in runs if run], launchers)}
    points = tuple(
        _result(number, point.settings, run, statuses[str(run.paths.directory)])
        if run
        else _unknown(sweep, number, point)
        for number, (point, run) in enumerate(zip(sweep.points, runs, strict=True), 1)
    )
    # none where there is none, or where the training has diverged
    known = {point.number: point.validation_loss for point in points if point.validation_loss is not None}
    losses = {number: loss for number, loss in known.items() if math.isfinite(loss)}
    note = _incomparable([run for number, run in enumerate(runs, 1) if run and number in losses])
    return SweepResult(
        name=sweep.name,
        directory=str(sweep.directory),
        runs_at_a_time=sweep.runs_at_a_time,
        keys=tuple(sweep.keys),
        points=points,
        best=min(losses, key=losses.__getitem__) if losses and not note else None,
        note=note,
    )


def sweep_reports(sweep: Sweep, launchers: Launchers) -> list[RunReport]:
    """What the page of the sweep shows: each run that was submitted, named after its settings if there are several.

    Raises UserError when none was submitted.
    """
    submitted = [(point, run) for point in sweep.points if (run := sweep.open_if_intact(point)) and run.journal.jobs()]
    if not submitted:
        raise UserError(f"{sweep.directory}: no run of this sweep was submitted", "hyperpod-ft sweep resume")
    statuses = statuses_of([run for _, run in submitted], launchers)
    reports = [gather(run, current) for (_, run), current in zip(submitted, statuses, strict=True)]
    if len(reports) == 1:
        return reports
    short = {key: key.rpartition(".")[2] for key in sweep.keys}
    keys = short if len(set(short.values())) == len(short) else {key: key for key in short}
    named = [_named_after(point.settings, keys, report) for (point, _), report in zip(submitted, reports, strict=True)]
    return named if len({report.name for report in named}) == len(named) else reports


def _named_after(settings: Settings, keys: Mapping[str, str], report: RunReport) -> RunReport:
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    name = ", ".join(f"{keys[key]} {shortened(value)}" for key, value in values.items()) or report.name
    summary = report.training_summary and replace(report.training_summary, run=name)
    return replace(report, name=name, training_summary=summary)


def _unknown(sweep: Sweep, number: int, point: Point) -> PointResult:
    directory, why = str(sweep.run_directory(point)), "was removed, or cannot be opened"
    return PointResult(number, point.settings, point.run, directory, "unknown", why)


def _result(number: int, settings: Settings, run: Run, current: RunStatus) -> PointResult:
    trained, latest = current.training_summary, current.training
    steps = trained.steps if trained else latest.step if latest else None
    validation = None
    if trained:
        validation = trained.best_validation_loss if run.config.training.keep_best else trained.validation_loss
    return PointResult(
        number=number,
        settings=settings,
        run=run.paths.full_name,
        directory=current.directory,
        state=current.state,
        detail=current.note or _stage(current),
        step=steps,
        total_steps=trained.steps if trained else latest.total_steps if latest else None,
        loss=current.loss,
        validation_loss=validation,
    )


def _stage(current: RunStatus) -> str:
    """The stage that decides the state of the run, and why."""
    if current.state in ("done", "not run", "cancelled"):
        return ""
    stage = next((stage for stage in current.stages if stage.state == current.state), None)
    if stage is None:
        return ""
    detail = stage.restarts if current.state == "running" else stage.detail
    return f"{stage.stage}: {detail}" if detail else stage.stage


def _incomparable(compared: Sequence[Run]) -> str:
    """Losses over different rows, or of different objectives, say nothing about which model is better."""
    if len({run.plan["dataset"].fingerprint for run in compared}) > 1:
        return "no best point: the datasets differ, so the validation losses are over different rows"
    if len({run.config.training.objective for run in compared}) > 1:
        return "no best point: the objectives differ, so the validation losses are different quantities"
    return ""
