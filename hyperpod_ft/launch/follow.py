"""Following a run until it ends: its status, the log of a stage, and what a failed stage said."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.status import ACTIVE, RunStatus, StageStatus, status
from hyperpod_ft.progress import poll_seconds
from hyperpod_ft.runs.job_files import BANNER
from hyperpod_ft.runs.results.log_text import tail
from hyperpod_ft.runs.run import Run

# a local cluster has no other users; a shared slurmctld is asked less often
_POLL_SECONDS, _POLL_SECONDS_LOCAL = 10.0, 1.0
_MAX_UNANSWERED, _RETRY_SECONDS = 20, 15.0  # five minutes
_LAST_LINES = 12


class _Patience:
    """Waits for a launcher that does not answer, for five minutes without an answer; then raises UserError."""

    def __init__(self, remedy: str, pause: Callable[[float], None] = time.sleep) -> None:
        self._remedy, self._pause = remedy, pause
        self._unanswered = 0

    def answered(self) -> None:
        self._unanswered = 0

    def wait(self, note: str) -> None:
        self._unanswered += 1
        if self._unanswered == _MAX_UNANSWERED:
            raise UserError(note, self._remedy)
        self._pause(_RETRY_SECONDS)


def follow(
    run: Run,
    launchers: Launchers,
    say: Callable[[str], None] = print,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[RunStatus]:
    """The status of the run, again and again until no stage is running or pending. Creates each job when it is due.

    Calls `say` with a line about each job that it creates, and `pause` with the seconds between two looks. While the
    launcher does not answer, or refuses the next job, yields statuses with a note. Raises UserError when it has for
    five minutes.
    """
    patience = _Patience(f"later: hyperpod-ft watch {run.paths.directory}", pause)
    while True:
        current = status(run, launchers)
        if not current.note and not any(stage.state == "running" for stage in current.stages):
            try:
                if created := launchers.advance(run):
                    say(f"created training job {created}")
                    current = status(run, launchers)
            except UserError as error:
                current = replace(current, note=str(error))
        yield current
        if current.note:
            patience.wait(current.note)
            continue
        patience.answered()
        if not any(stage.state in ACTIVE for stage in current.stages):
            return
        pause(_poll_seconds(run.config))


def log(run: Run, launchers: Launchers, stage: str | None, until_it_ends: bool) -> Iterator[str]:
    """The text of a stage's newest log: of the given stage, or of the one that failed, is at work or ended last.

    With `until_it_ends`, waits for the stage to start and yields what is added until it ends. A stage without a log
    yields a line that says so. Raises UserError for an unknown stage, and when the launcher stops answering for five
    minutes.
    """
    if stage is not None:
        run.plan.require(stage)
    position, path, job_id = 0, "", ""
    answered, patience = False, _Patience(f"later: hyperpod-ft logs -f {run.paths.directory}")
    while True:
        current = status(run, launchers)
        chosen, note = choose_stage(current, stage), current.note
        # the state is read before the text, so that nothing written before the end is missed
        ended = not until_it_ends or chosen.state not in ACTIVE
        if chosen.job_id != job_id:  # a training job that continues another has its own log
            position, path, job_id = 0, "", chosen.job_id
        try:
            path = log_file(run, launchers, chosen, path)
        except UserError as error:
            if not (answered and until_it_ends):
                raise
            note = note or str(error)
        if answered and note and until_it_ends:
            patience.wait(note)
            continue
        answered = not note
        patience.answered()
        if path:
            stage = chosen.stage
            with Path(path).open(encoding="utf-8", errors="replace") as stream:
                stream.seek(position)
                yield stream.read()
                position = stream.tell()
        elif ended:
            reason = f": {current.note}" if current.note else ""
            yield f"no log: stage {chosen.stage}: {chosen.state}{reason}\n"
        if ended:
            return
        time.sleep(_poll_seconds(run.config))


def log_file(run: Run, launchers: Launchers, stage: StageStatus, chosen: str = "") -> str:
    """The path of a stage's log, or `chosen`, with what its job has printed so far; empty without one."""
    job = run.journal.latest_jobs().get(stage.stage)
    if job is None:
        return stage.log
    path = launchers.log(run, job)  # also when it is known: this brings what is new
    return chosen or str(path or "")


def last_lines(failed: StageStatus) -> list[str]:
    """The errors that a failed stage printed in its last attempt; the end of its log when it printed none."""
    lines = tail(Path(failed.log), 400) if failed.log else []
    started = max((number for number, line in enumerate(lines) if BANNER.match(line)), default=0)
    errors = [line for line in lines[started:] if line.startswith("error: ")]
    return list(dict.fromkeys(errors)) or lines[-_LAST_LINES:]


def choose_stage(current: RunStatus, stage: str | None) -> StageStatus:
    """The given stage, or else the one that failed, is at work, waits, or ended last with a log."""
    if stage is not None:
        return next(stage_status for stage_status in current.stages if stage_status.stage == stage)
    for state in ("failed", *ACTIVE):
        for stage_status in current.stages:
            if stage_status.state == state:
                return stage_status
    return next((stage_status for stage_status in reversed(current.stages) if stage_status.log), current.stages[0])


def _poll_seconds(config: RunConfig) -> float:
    return poll_seconds(_POLL_SECONDS_LOCAL if config.cluster.instance_type == "local" else _POLL_SECONDS)
