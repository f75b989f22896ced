"""What the script of a job that trains becomes: it starts the ranks, and again when they crash, until they are done.

    python -m hyperpod_ft.job.supervisor STAGE RUN_DIR COMMAND...

`restarts.decide` says what follows each attempt. SIGUSR1, Slurm's notice of the time limit, is handed on to the
command (srun passes it to the nodes), so that the ranks save a checkpoint; then the job is requeued: what depends on
it keeps waiting. Exit status: as a stage's.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from hyperpod_ft import publish
from hyperpod_ft.config.instances import CATALOGUE
from hyperpod_ft.errors import EXIT_USER_ERROR, UserError
from hyperpod_ft.launch.slurm import Slurm
from hyperpod_ft.runs import restarts
from hyperpod_ft.runs.restarts import NOTICE_STATUS, TERMINATED_STATUS, Decision, Outcome
from hyperpod_ft.runs.run import Run

_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
# Of the time between the notice and the limit, what the ranks get to save in before the job is requeued under them.
_SHARE_TO_SAVE = 0.8
_POLL_SECONDS = 0.1
_SLURM_ENDS_IT_WITHIN_SECONDS = 120
_SIGNALS_REACH_ALL_WITHIN_SECONDS = 1
_SAVED_BY_NOW_SECONDS = 45  # more than Slurm's KillWait
# What scontrol says when its controller does not answer; other words are a refusal.
_AWAY = re.compile(r"contact|connect|timed out|answer", re.IGNORECASE)
_SLURM_IS_AWAY_SECONDS = 60
_ASK_AGAIN_SECONDS = 5


class Signals:
    """What this process was told, and the child that hears of the notice too."""

    def __init__(self) -> None:
        self.told = 0
        self.child: subprocess.Popen[bytes] | None = None
        self._first_at = 0.0
        for number in _SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._first_at = self._first_at or time.monotonic()
        if number == signal.SIGTERM or not self.told:  # the end outranks the notice
            self.told = number
        # Slurm sends SIGTERM to every process of the job by itself
        if number == signal.SIGUSR1 and self.child is not None and self.child.poll() is None:
            self.child.send_signal(number)

    def seconds_since(self) -> float:
        """Since the first signal; 0 before it."""
        return time.monotonic() - self._first_at if self.told else 0.0

    def wait(self, seconds: float, awaited: tuple[int, ...] = _SIGNALS) -> None:
        """Until the time is over, or one of the signals has come."""
        deadline = time.monotonic() + seconds
        while self.told not in awaited and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


def supervise(run: Run, stage: str, command: Sequence[str], signals: Signals) -> int | None:
    """Attempt the command until it has succeeded or is given up; returns the exit status, None when requeued.

    Raises UserError when Slurm does not requeue the job.
    """
    job_id = os.environ.get("HYPERPOD_FT_JOB_ID", "manual")
    slurm_id = os.environ.get("SLURM_JOB_ID", "")
    accelerators = CATALOGUE[run.config.cluster.instance_type].has_accelerators
    allowed = run.config.cluster.max_restarts
    begun_at = restarts.newest_checkpoint(run)
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        restarts.forget(run, stage, job_id)
    while True:
        earlier = [restart for restart in restarts.history(run, stage) if restart.job_id == job_id]
        outcome = _attempt(run, stage, command, signals, begun_at, job_id)
        decision = restarts.decide(outcome, earlier, allowed, requeues=bool(slurm_id))
        if decision.what == "retry":
            restarts.remember(run, stage, job_id, outcome, decision)
            pause = restarts.pause_seconds(decision.number, accelerators)
            _tell(stage, decision, f" in {pause} s")
            signals.wait(pause)
            if not signals.told:
                print(f"== {stage} job {job_id}, restart {decision.number}", flush=True)
                continue
            decision = restarts.decide(replace(outcome, told=signals.told), earlier, allowed, requeues=bool(slurm_id))
        _tell(stage, decision)
        if decision.what == "end":
            return decision.status
        restarts.remember(run, stage, job_id, outcome, decision)
        _requeue(slurm_id, signals)
        # Slurm ends this job as soon as it can; a script that ended by itself first would be a job that failed
        signals.wait(_SLURM_ENDS_IT_WITHIN_SECONDS, (signal.SIGTERM,))
        return None


def _requeue(slurm_id: str, signals: Signals) -> None:
    """Ask until Slurm has understood: its controller may be away for a while. Raises UserError when it does not."""
    deadline = time.monotonic() + _SLURM_IS_AWAY_SECONDS
    while True:
        try:
            Slurm().requeue(slurm_id)
        except UserError as error:
            if not _AWAY.search(str(error)) or time.monotonic() > deadline:
                raise
            signals.wait(_ASK_AGAIN_SECONDS, (signal.SIGTERM,))
            if signals.told == signal.SIGTERM:
                raise
        else:
            return


def _attempt(run: Run, stage: str, command: Sequence[str], signals: Signals, begun_at: int, job_id: str) -> Outcome:
    directory = run.attempt_directory(stage, job_id)
    publish.remove(directory)
    directory.mkdir(parents=True)
    environment = os.environ | {restarts.ATTEMPT_DIRECTORY: str(directory)}
    signals.child = child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
    seconds_to_save = _SHARE_TO_SAVE * run.plan[stage].resources.warning_seconds
    ended = False
    while child.poll() is None:
        if signals.told == signal.SIGTERM and not ended and signals.seconds_since() > _SAVED_BY_NOW_SECONDS:
            child.terminate()  # it came to this process alone; a second one would cut short what the first began
            ended = True
        if signals.told == signal.SIGUSR1 and signals.seconds_since() > seconds_to_save:
            break  # ranks hang, or a step takes longer than there is time
        time.sleep(_POLL_SECONDS)
    if child.returncode:
        signals.wait(_SIGNALS_REACH_ALL_WITHIN_SECONDS)  # a job that is cancelled did not crash
    status = NOTICE_STATUS if child.returncode is None else child.returncode
    return Outcome(
        status=status if status >= 0 else 128 - status,
        endings=restarts.endings(directory) if status else (),
        told=signals.told,
        begun_at=begun_at,
        checkpoint=restarts.newest_checkpoint(run),
        step=restarts.last_step(run),
    )


def _tell(stage: str, decision: Decision, more: str = "") -> None:
    if decision.words:
        # what a user can mend is marked as such errors are
        mark = "error: " if decision.status == EXIT_USER_ERROR else ""
        print(f"{mark}{stage}: {decision.words}{more}", flush=True)


def main() -> int:
    """Run the command line; returns the exit status, which it leaves on the shared volume as every script does."""
    stage, directory, *command = sys.argv[1:]
    signals = Signals()
    try:
        run = Run.open(Path(directory))
    except UserError as error:
        print(f"error: {stage}: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    marker = run.exit_marker(stage, os.environ.get("HYPERPOD_FT_JOB_ID", "manual"))
    publish.remove(marker)  # of the time before the job was requeued
    try:
        status = supervise(run, stage, command, signals)
    except UserError as error:
        print(f"error: {stage}: {error}", file=sys.stderr, flush=True)
        status = EXIT_USER_ERROR
    except BaseException:
        # this process is the script: nobody else would end the ranks, or leave the exit status
        if signals.child is not None and signals.child.poll() is None:
            signals.child.terminate()
        with contextlib.suppress(OSError):
            publish.write_text(marker, "1\n")
        raise
    if status is None:  # it has not ended
        return TERMINATED_STATUS
    publish.write_text(marker, f"{status}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
