"""What the commands print: plain lines, and on a terminal a table that is kept up to date while a run is watched."""

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.launcher import Launcher
from hyperpod_ft.launch.monitor import RunStatus, StageStatus, steps, tail
from hyperpod_ft.launch.monitor import status as status_of
from hyperpod_ft.launch.submit import check
from hyperpod_ft.planning.memory import GIB, Memory, available
from hyperpod_ft.planning.schedule import rows_per_step
from hyperpod_ft.runs import figures
from hyperpod_ft.runs.figures import Figures
from hyperpod_ft.runs.records import Job
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import choose

# a local cluster is nobody else's; a shared slurmctld is spared
_POLL_SECONDS = {True: 1.0, False: 10.0}
_LINE_EVERY_SECONDS = 10.0
_SLURM_ATTEMPTS = 20
_SLURM_RETRY_SECONDS = 15.0
_ANSWERS_SHOWN = 8
_ANSWER_WIDTH = 90
_STYLES = {
    "done": "green",
    "running": "cyan",
    "failed": "bold red",
    "cancelled": "yellow",
    "pending": "dim",
    "unknown": "yellow",
}


def shown(path: Path | str) -> str:
    """A path as a person would type it from here."""
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)


def plan_as_dict(run: Run) -> dict[str, Any]:
    """The plan with what is known only on this volume: what is done, and the steps."""
    memory = check(run)
    will_run = {stage.name for stage in choose(run)}
    values = run.plan.as_dict()
    for stage in values["stages"]:
        stage["runs"] = stage["name"] in will_run
        stage["reason"] = run.why_not_done(stage["name"])
    known = steps(run)
    return {
        "run_directory": str(run.directory),
        **values,
        "memory": {"available_bytes": available(run.config), "bytes": asdict(memory)} if memory else None,
        "steps_per_epoch": known.per_epoch if known else None,
        "total_steps": known.total if known else None,
    }


def plan(run: Run) -> None:
    values = plan_as_dict(run)
    layout = run.plan.degrees
    training = run.config.training
    print(f"run       {run.config.name}/{run.plan.run_id}  in {shown(run.directory)}")
    print(f"engine    {run.config.engine}, {run.config.training.method}, {training.precision}")
    print(
        f"ranks     {layout.nodes} x {run.config.cluster.instance_type}, {layout.ranks_per_node} a node"
        f" = {layout.world_size}: tensor {layout.tensor_parallel} x pipeline {layout.pipeline_parallel}"
        f" x data {layout.data_parallel}"
    )
    if memory := values["memory"]:
        print(f"memory    {Memory(**memory['bytes'])}; it has {memory['available_bytes'] / GIB:.1f} (estimated)")
    rows = rows_per_step(training, layout.data_parallel)
    tokens = rows * run.config.dataset.max_length
    print(f"step      {rows} rows = {tokens:,} tokens at most")
    if (per_epoch := values["steps_per_epoch"]) is None:
        print("steps     known once the dataset is prepared")
    else:
        print(f"steps     {values['total_steps']}, {per_epoch:.1f} an epoch")
    table = _table("stage", "", "why", "nodes", "partition", "fingerprint")
    for stage in values["stages"]:
        resources = stage["resources"]
        needed = "not needed by what follows" if stage["reason"] else "done"
        table.add_row(
            stage["name"],
            "run" if stage["runs"] else "skip",
            stage["reason"] if stage["runs"] else needed,
            str(resources["nodes"]),
            resources["partition"] or "default",
            stage["fingerprint"],
        )
    _console().print(table)


def submitted(run: Run, jobs: Sequence[Job]) -> None:
    if not jobs:
        print(f"Nothing to submit: every stage of {run.config.name}/{run.plan.run_id} is done.")
        print(f"Model: {shown(run.tuned_model)}")
        return
    skipped = [stage.name for stage in run.plan.stages if run.is_done(stage.name)]
    print(f"Submitted {run.config.name}/{run.plan.run_id}: " + ", ".join(f"{j.stage} {j.job_id}" for j in jobs))
    if skipped:
        print(f"Skipped, since done: {', '.join(skipped)}")
    print(f"Run directory: {shown(run.directory)}")
    print("Follow it: hyperpod-ft status, hyperpod-ft logs -f; stop it: hyperpod-ft cancel")


def status(current: RunStatus) -> None:
    _console().print(_status_table(current))
    if current.figures:
        print(f"trained: {figures.line(current.figures)}")
    _advice(current)


def _status_table(current: RunStatus) -> RenderableType:
    table = _table("stage", "state", "job", "")
    for stage in current.stages:
        detail = f"{stage.seconds:.1f} s  {stage.detail}" if stage.seconds is not None else stage.detail
        if stage.stage == "train" and stage.state == "running" and current.progress:
            samples = current.progress.samples_per_second
            rate = f"  {samples:,.2f} samples/s" if samples else ""
            detail = f"{_progress(current)}{rate}  {detail}"
        detail = ", ".join(part for part in (stage.restarts, detail) if part)
        table.add_row(stage.stage, Text(stage.state, _STYLES.get(stage.state, "")), stage.job_id, Text(detail))
    return Group(Text(f"{current.name}: {current.state}  ({shown(current.directory)})"), table)


def _progress(current: RunStatus) -> str:
    progress = current.progress
    if progress is None:
        return ""
    total = f"/{progress.total_steps}" if progress.total_steps else ""
    rate = f"  {progress.tokens_per_second:,.0f} tokens/s" if progress.tokens_per_second else ""
    mfu = f"  MFU {progress.mfu:.1%}" if progress.mfu is not None else ""
    return f"step {progress.step}{total}  loss {progress.loss:.4f}{rate}{mfu}"


def _advice(current: RunStatus) -> None:
    """For a failed run its last words, and in any case how to go on."""
    directory = shown(current.directory)
    if current.note:
        print(current.note)
    if failed := current.failed:
        print(f"\n{failed.stage} failed: {failed.detail}")
        for line in _last_words(failed):
            print(f"  | {_printable(line)}")
        if failed.log:
            print(f"Whole log: {shown(failed.log)}")
        print(f"Run file or data corrected: hyperpod-ft submit {current.origin or 'RUN_FILE'}")
        print(f"To try again unchanged:     hyperpod-ft resume {directory}")
    elif current.state in ("cancelled", "not run"):
        print(f"Go on: hyperpod-ft resume {directory}")
    elif current.state == "done":
        print(f"Model: {shown(current.model)}")


def _last_words(failed: StageStatus) -> list[str]:
    """What a failed stage says was wrong, in its own words if it has any, or else the end of its log."""
    lines = tail(Path(failed.log), 400) if failed.log else []
    begun = max((number for number, line in enumerate(lines) if line.startswith("== ")), default=0)
    errors = [line for line in lines[begun:] if line.startswith("error: ")]
    return list(dict.fromkeys(errors)) or lines[-12:]


def watch(run: Run, slurm: Launcher) -> bool:
    """Follow a run until no job is active; returns whether all is done. Ctrl-C ends the watching, not the run."""
    try:
        current = _watch_terminal(run, slurm) if sys.stdout.isatty() else _watch_lines(run, slurm)
    except KeyboardInterrupt:
        print(f"\nNo longer watching. Stop the run: hyperpod-ft cancel {shown(run.directory)}")
        raise SystemExit(130) from None
    if current.state == "done":
        results(run)
    _advice(current)
    return current.state == "done"


def _pause(run: Run) -> None:
    time.sleep(_POLL_SECONDS[run.config.cluster.instance_type == "local"])


def _ended(current: RunStatus) -> bool:
    return not any(stage.state in ("running", "pending") for stage in current.stages)


def _patient_status(run: Run, slurm: Launcher) -> RunStatus:
    """The status; a Slurm that does not answer for a while does not end the watching."""
    for _ in range(_SLURM_ATTEMPTS):
        current = status_of(run, slurm)
        if not current.note:
            return current
        print(f"{_clock()}  {current.note}", file=sys.stderr, flush=True)
        time.sleep(_SLURM_RETRY_SECONDS)
    raise UserError(current.note, f"later: hyperpod-ft status {shown(run.directory)}")


def _watch_terminal(run: Run, slurm: Launcher) -> RunStatus:
    with Live(console=_console(), auto_refresh=False) as live:
        while True:
            current = _patient_status(run, slurm)
            live.update(_status_table(current), refresh=True)
            if _ended(current):
                return current
            _pause(run)


def _watch_lines(run: Run, slurm: Launcher) -> RunStatus:
    told: dict[str, str] = {}
    last_line = 0.0
    while True:
        current = _patient_status(run, slurm)
        for stage in current.stages:
            now = f"{stage.state}, {stage.restarts}" if stage.restarts else stage.state
            if told.get(stage.stage) != now and stage.state not in ("pending", "not run"):
                told[stage.stage] = now
                seconds = f" in {stage.seconds:.1f} s" if stage.seconds is not None else ""
                print(f"{_clock()}  {stage.stage:<12} {now}{seconds}", flush=True)
        if current.progress and time.monotonic() - last_line > _LINE_EVERY_SECONDS and _is_training(current.stages):
            last_line = time.monotonic()
            print(f"{_clock()}  {'train':<12} {_progress(current)}", flush=True)
        if _ended(current):
            return current
        _pause(run)


def _is_training(stages: Iterable[StageStatus]) -> bool:
    return any(stage.stage == "train" and stage.state == "running" for stage in stages)


def results(run: Run) -> None:
    """Base and tuned answers side by side, the figures, and where the model lies."""
    values = json.loads(run.samples.read_text(encoding="utf-8"))
    shown_rows = [*values["prompts"], *values["samples"]][:_ANSWERS_SHOWN]
    table = _table("prompt", "base model", "tuned model")
    for row in shown_rows:
        table.add_row(*(Text(_clip(row[column])) for column in ("prompt", "base", "tuned")))
    _console().print(table)
    for split, exact in values["exact_match"].items():
        if exact["rows"]:
            base, tuned = (f"{exact[model]}/{exact['rows']}" for model in ("base", "tuned"))
            print(f"exact answers, {split} rows: base {base}, tuned {tuned}")
    if loss := values["validation_loss"]:
        print(f"validation loss: base {loss['base']['mean']:.4f}, tuned {loss['tuned']['mean']:.4f}")
    print(f"All answers: {shown(run.samples)}")


def _clip(text: str) -> str:
    """One line, of a width that fits a table."""
    line = _printable(" ".join(text.split()))
    return line if len(line) <= _ANSWER_WIDTH else line[: _ANSWER_WIDTH - 1] + "…"


def _printable(text: str) -> str:
    """Models and programs may say anything, sequences that control a terminal included."""
    return "".join(character if character.isprintable() else "?" for character in text)


def log(run: Run, slurm: Launcher, stage: str | None, follow: bool) -> None:
    """Print a stage's newest log: the given stage's, or that of the one that failed, works or ended last.

    With `follow`, wait for it to begin and go on until the stage ends. Raises UserError for an unknown stage.
    """
    if stage is not None and stage not in run.plan:
        raise UserError(f"no stage {stage!r} in this run", f"its stages: {', '.join(s.name for s in run.plan.stages)}")
    position = 0
    while True:
        chosen = _choose_log(status_of(run, slurm), stage)
        # the state is read before the text, so that nothing written before the end is missed
        ended = not follow or chosen.state not in ("running", "pending")
        if chosen.log:
            stage = chosen.stage
            with Path(chosen.log).open(encoding="utf-8", errors="replace") as stream:
                stream.seek(position)
                print(stream.read(), end="", flush=True)
                position = stream.tell()
        elif ended:
            print(f"no log: stage {chosen.stage}: {chosen.state}")
        if ended:
            return
        _pause(run)


def _choose_log(current: RunStatus, stage: str | None) -> StageStatus:
    if stage is not None:
        return next(known for known in current.stages if known.stage == stage)
    for state in ("failed", "running", "pending"):
        for known in current.stages:
            if known.state == state:
                return known
    return next((known for known in reversed(current.stages) if known.log), current.stages[0])


def runs(root: Path, statuses: Sequence[RunStatus]) -> None:
    if not statuses:
        print(f"no runs below {root}")
        return
    table = _table("run", "state", "submitted", "directory")
    for current in statuses:
        run_id = Path(current.directory).name
        table.add_row(
            f"{current.name}/{run_id}",
            Text(current.state, _STYLES.get(current.state, "")),
            current.submitted,
            shown(current.directory),
        )
    _console().print(table)


def comparison(compared: Sequence[Figures]) -> None:
    """A column for each training."""
    head, *lines = figures.table(compared)
    table = _table(*head)
    for column in table.columns[1:]:
        column.justify = "right"
    for cells in lines:
        table.add_row(*(Text(cell) for cell in cells))
    _console().print(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _console() -> Console:
    # in a pipe rich assumes 80 columns and would fold paths that a script reads
    return Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def _clock() -> str:
    return time.strftime("%H:%M:%S")
