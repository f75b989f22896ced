"""`submit --watch`: follow a run until none of its jobs is active, on a terminal in one table, elsewhere in lines."""

import sys
import time
from collections.abc import Iterable

from rich.live import Live

from hyperpod_ft.cli import show_runs
from hyperpod_ft.cli.tables import clock, console, shown
from hyperpod_ft.launch.follow import follow
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.status import RunStatus
from hyperpod_ft.runs.run import Run

_LINE_EVERY_SECONDS = 10.0


def follow_run(run: Run, launchers: Launchers) -> bool:
    """Follow a run until no job is active; returns whether all is done. Ctrl-C ends the watching, not the run."""
    statuses = follow(run, launchers)
    try:
        current = _on_terminal(statuses) if sys.stdout.isatty() else _as_lines(statuses)
    except KeyboardInterrupt:
        print(f"\nNo longer watching. Stop the run: hyperpod-ft cancel {shown(run.directory)}")
        raise SystemExit(130) from None
    if current.state == "done":
        show_runs.results(run)
    show_runs.advice(current)
    return current.state == "done"


def _on_terminal(statuses: Iterable[RunStatus]) -> RunStatus:
    with Live(console=console(), auto_refresh=False) as live:
        for current in statuses:
            if current.created:
                print(f"{clock()}  {show_runs.created_line(current.created)}", flush=True)
            if current.note:
                print(f"{clock()}  {current.note}", file=sys.stderr, flush=True)
            else:
                live.update(show_runs.status_table(current), refresh=True)
    return current


def _as_lines(statuses: Iterable[RunStatus]) -> RunStatus:
    printed: dict[str, str] = {}
    progress_printed = 0.0
    for current in statuses:
        if current.created:
            print(f"{clock()}  {show_runs.created_line(current.created)}", flush=True)
        if current.note:
            print(f"{clock()}  {current.note}", file=sys.stderr, flush=True)
            continue
        for stage in current.stages:
            now = f"{stage.state}, {stage.restarts}" if stage.restarts else stage.state
            if printed.get(stage.stage) != now and stage.state not in ("pending", "not run"):
                printed[stage.stage] = now
                seconds = f" in {stage.seconds:.1f} s" if stage.seconds is not None else ""
                print(f"{clock()}  {stage.stage:<12} {now}{seconds}", flush=True)
        training = any(stage.stage == "train" and stage.state == "running" for stage in current.stages)
        if current.progress and training and time.monotonic() - progress_printed > _LINE_EVERY_SECONDS:
            progress_printed = time.monotonic()
            print(f"{clock()}  {'train':<12} {show_runs.training_progress(current)}", flush=True)
    return current
