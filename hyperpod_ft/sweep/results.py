"""The state of a sweep: of each point its run's state and validation loss, and which one is best."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.status import RunStatus, status
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sweep.sweep import Sweep
from hyperpod_ft.sweep.sweep_file import Settings


@dataclass(frozen=True)
class PointResult:
    """One point of a sweep, as far as its run is."""

    number: int  # from 1
    settings: Settings
    run: str  # name/id
    directory: str
    state: str
    detail: str  # the stage that failed or is at work, or why there is no state
    step: int | None
    total_steps: int | None
    loss: float | None  # of the newest step, or the final one
    validation_loss: float | None  # of the weights that the tuned model is made from


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


def sweep_result(sweep: Sweep) -> SweepResult:
    """Asks the launcher of each run. A run that was deleted is `unknown`."""
    found: list[PointResult] = []
    compared: list[Run] = []
    for number, point in enumerate(sweep.points, 1):
        directory = str(sweep.root / "runs" / point.run)
        try:
            run = sweep.open_run(point)
        except UserError as error:
            unknown = (None, None, None, None)
            found.append(PointResult(number, point.settings, point.run, directory, "unknown", error.problem, *unknown))
            continue
        result = _result(number, point.settings, run, status(run, Launchers.of(run)))
        found.append(result)
        if result.validation_loss is not None:
            compared.append(run)
    note = _incomparable(compared)
    losses = {point.number: point.validation_loss for point in found if point.validation_loss is not None}
    return SweepResult(
        name=sweep.name,
        directory=str(sweep.directory),
        runs_at_a_time=sweep.runs_at_a_time,
        keys=tuple(sweep.keys),
        points=tuple(found),
        best=min(losses, key=losses.__getitem__) if losses and not note else None,
        note=note,
    )


def _result(number: int, settings: Settings, run: Run, current: RunStatus) -> PointResult:
    trained, progress = current.figures, current.progress
    steps = trained.steps if trained else progress.step if progress else None
    loss = trained.final_loss if trained else progress.loss if progress else None
    validation = None
    if trained:
        validation = trained.best_validation_loss if run.config.training.keep_best else trained.validation_loss
    return PointResult(
        number=number,
        settings=settings,
        run=run.full_name,
        directory=current.directory,
        state=current.state,
        detail=current.note or _stage(current),
        step=steps,
        total_steps=trained.steps if trained else progress.total_steps if progress else None,
        loss=loss,
        validation_loss=validation,
    )


def _stage(current: RunStatus) -> str:
    """The stage that decides the state of the run, and why."""
    if current.state in ("done", "not run", "cancelled"):
        return ""
    stage = next((stage for stage in current.stages if stage.state == current.state), None)
    if stage is None:
        return ""
    detail = stage.detail if current.state == "failed" else stage.restarts
    return f"{stage.stage}: {detail}" if detail else stage.stage


def _incomparable(compared: Sequence[Run]) -> str:
    """Losses over different rows, or of different objectives, say nothing about which model is better."""
    if len({run.plan["dataset"].fingerprint for run in compared}) > 1:
        return "no best point: the datasets differ, so the validation losses are over different rows"
    if len({run.config.training.objective for run in compared}) > 1:
        return "no best point: the objectives differ, so the validation losses are different quantities"
    return ""
