"""Following a run until none of its jobs is active: in a view on a terminal, elsewhere in lines."""

import sys
import time
from collections.abc import Iterable

from hyperpod_ft.cli.output import show_runs
from hyperpod_ft.cli.output.tables import clock, console, shown
from hyperpod_ft.cli.watch import session, terminal
from hyperpod_ft.launch.follow import follow
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.status import RunStatus, StageStatus
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import RunPaths

_PROGRESS_SECONDS = 10.0


def follow_run(run: Run, launchers: Launchers) -> bool:
    """Follow a run until no job is active; returns whether all is done. Leaving ends the watching, not the run."""
    try:
        if terminal.can_draw():
            current, ended = session.watch(run, launchers)
            console().print(show_runs.status_table(current))
        else:
            current, ended = follow_in_lines(follow(run, launchers, _print_event)), True
    except KeyboardInterrupt:
        print()
        _left(run.paths)
        raise SystemExit(130) from None
    if not ended:
        _left(run.paths)
        raise SystemExit(0)
    if current.state == "done":
        if run.paths.store_listing.exists():  # its stages ran elsewhere
            from hyperpod_ft.report.gather import gather
            from hyperpod_ft.report.page import write_report

            write_report([gather(run)], run.paths.report_path)
        show_runs.results(run)
    show_runs.advice(current)
    return current.state == "done"


def _left(paths: RunPaths) -> None:
    print(f"No longer watching. Stop the run: hyperpod-ft cancel {shown(paths.directory)}")


def follow_in_lines(statuses: Iterable[RunStatus]) -> RunStatus:
    """Print what changes between the statuses; returns the last one."""
    printed: dict[str, str] = {}
    progress_printed = 0.0
    for current in statuses:
        if current.note:
            print(f"{clock()}  {current.note}", file=sys.stderr, flush=True)
            continue
        for stage in current.stages:
            now = f"{stage.state}, {stage.restarts}" if stage.restarts else stage.state
            if printed.get(stage.stage) != now and stage.state not in ("pending", "not run"):
                printed[stage.stage] = now
                seconds = f" in {stage.seconds:.1f} s" if stage.seconds is not None else ""
                _print_event(f"{stage.stage:<12} {now}{seconds}")
        known = [(stage.stage, text) for stage in current.stages if (text := _progress(current, stage))]
        if known and time.monotonic() - progress_printed > _PROGRESS_SECONDS:
            progress_printed = time.monotonic()
            for name, text in known:
                _print_event(f"{name:<12} {text}")
    return current


def _print_event(text: str) -> None:
    print(f"{clock()}  {text}", flush=True)


def _progress(current: RunStatus, stage: StageStatus) -> str:
    if stage.state != "running":
        return ""
    if stage.stage == "train" and current.training:
        return show_runs.training_progress(current)
    return stage.progress.text if stage.progress else ""
