"""Output of the commands about sweeps: lines and tables."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.text import Text

from hyperpod_ft.cli.output.show_runs import STATE_STYLES
from hyperpod_ft.cli.output.tables import clip, console, shown, table
from hyperpod_ft.progress import count
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import choose
from hyperpod_ft.sweep.planning import PlannedSweep
from hyperpod_ft.sweep.results import PointResult, SweepResult
from hyperpod_ft.sweep.submission import SubmittedPoint
from hyperpod_ft.sweep.sweep import Sweep


def plan_values(planned: PlannedSweep) -> dict[str, Any]:
    """The plan as JSON values. A shared stage is listed for the first point that needs it."""
    rows = zip(planned.sweep.points, planned.runs, _stages_to_run(planned), strict=True)
    return {
        "name": planned.sweep.name,
        "directory": str(planned.sweep.directory),
        "runs_at_a_time": planned.sweep.runs_at_a_time,
        "points": [
            {"settings": point.settings, "run": point.run, "run_directory": str(run.paths.directory), "stages": stages}
            for point, run, stages in rows
        ],
    }


def plan(planned: PlannedSweep) -> None:
    sweep = planned.sweep
    limit = _limit(sweep.runs_at_a_time)
    print(f"sweep     {sweep.name}: {len(sweep.points)} runs{limit}, in {shown(sweep.root)}")
    listed = table("point", *sweep.keys, "run", "stages to run")
    for number, (point, stages) in enumerate(zip(sweep.points, _stages_to_run(planned), strict=True), 1):
        listed.add_row(str(number), *_cells(sweep.keys, point.settings), point.run, " ".join(stages) or "none")
    console().print(listed)


def _stages_to_run(planned: PlannedSweep) -> list[list[str]]:
    seen: set[Path] = set()
    found: list[list[str]] = []
    for run in planned.runs:
        stages = [stage for stage in choose(run) if not (stage.shared and run.paths.record_path(stage.name) in seen)]
        seen.update(run.paths.record_path(stage.name) for stage in stages)
        found.append([stage.name for stage in stages])
    return found


def submitted(sweep: Sweep, points: Iterable[SubmittedPoint]) -> None:
    total, done, at_work = len(sweep.points), 0, 0
    for point in points:
        if point.jobs:
            jobs = ", ".join(f"{job.stage} {job.job_id}" for job in point.jobs)
            print(f"{point.number}/{total}  {point.run.paths.full_name}: {jobs}", flush=True)
        if point.refused:
            print(f"{point.number}/{total}  not submitted: {point.refused}", flush=True)
        done += point.done
        at_work += not (point.jobs or point.done or point.refused)
    if done:
        print(f"Already done: {done} of {total} runs")
    if at_work:
        print(f"Already at work: {at_work} of {total} runs")
    print(f"Sweep directory: {shown(sweep.directory)}")
    print("Follow it: hyperpod-ft sweep status; stop it: hyperpod-ft sweep cancel")


def status(result: SweepResult) -> None:
    limit = _limit(result.runs_at_a_time)
    states = [point.state for point in result.points]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))
    print(f"{result.name}: {len(states)} runs{limit}: {counts}  ({shown(result.directory)})")
    listed = table("", "point", *result.keys, "state", "", "step", "loss", "validation loss", "run")
    for point in result.points:
        listed.add_row(
            "*" if point.number == result.best else "",
            str(point.number),
            *_cells(result.keys, point.settings),
            Text(point.state, STATE_STYLES.get(point.state, "")),
            Text(clip(point.detail, 60)),
            _step(point),
            _loss(point.loss),
            _loss(point.validation_loss),
            point.run,
        )
    console().print(listed)
    if result.best is not None:
        best = result.points[result.best - 1]
        so_far = "" if all(state == "done" for state in states) else " so far"
        print(
            f"Best validation loss{so_far}: {_loss(best.validation_loss)}, point {best.number}: {shown(best.directory)}"
        )
    if result.note:
        print(result.note)
    if result.failed:
        print(f"Submit what is left: hyperpod-ft sweep resume {shown(result.directory)}")


def _limit(at_a_time: int | None) -> str:
    """Slurm limits the training runs: other stages of more runs may be at work."""
    return f", at most {count(at_a_time, 'training')} at a time" if at_a_time else ""


def cancelled(runs: Iterable[tuple[Run, tuple[Job, ...]]]) -> None:
    any_job = False
    for run, jobs in runs:
        any_job = True
        print(f"cancelled {run.paths.full_name}: {', '.join(f'{job.stage} {job.job_id}' for job in jobs)}", flush=True)
    if not any_job:
        print("nothing to cancel: no job of this sweep is active")


def _cells(keys: Iterable[str], settings: dict[str, Any]) -> list[Text]:
    return [Text(clip(_value(settings[key]), 40) if key in settings else "") for key in keys]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _step(point: PointResult) -> str:
    if point.step is None:
        return ""
    return f"{point.step}/{point.total_steps}" if point.total_steps else str(point.step)


def _loss(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4f}"
