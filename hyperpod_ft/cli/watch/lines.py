"""A run in lines, for logs and pipes: one for each change of a stage, and the progress every few seconds."""

import sys
import time
from collections.abc import Iterable

from hyperpod_ft.cli.output import show_runs
from hyperpod_ft.cli.output.tables import clock
from hyperpod_ft.launch.status import RunStatus, StageStatus

_PROGRESS_SECONDS = 10.0


def follow_in_lines(statuses: Iterable[RunStatus]) -> RunStatus:
    """Print what changes between the statuses; returns the last one."""
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
        known = [(stage.stage, text) for stage in current.stages if (text := _progress(current, stage))]
        if known and time.monotonic() - progress_printed > _PROGRESS_SECONDS:
            progress_printed = time.monotonic()
            for name, text in known:
                print(f"{clock()}  {name:<12} {text}", flush=True)
    return current


def _progress(current: RunStatus, stage: StageStatus) -> str:
    if stage.state != "running":
        return ""
    if stage.stage == "train" and current.training:
        return show_runs.training_progress(current)
    return stage.progress.text if stage.progress else ""
