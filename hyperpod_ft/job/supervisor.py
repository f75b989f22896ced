"""Supervise a job's ranks on its first node: start them, and again when they crash, until the stage is done.

    python -m hyperpod_ft.job.supervisor STAGE RUN_DIR COMMAND...

The job's script becomes this process. `recovery.decide` chooses what follows each attempt, `JobHost` says what is
different where the job runs: on other hosts of a training job, this process becomes COMMAND. The stage's record ends
the job, even when processes on other nodes hang or fail after it was written. SIGUSR1, the notice of the time limit, is
forwarded to the command (srun passes it to the nodes), so that the ranks save a checkpoint; then Slurm requeues the
job, and jobs that depend on it keep waiting; a SageMaker training job ends, and another continues. Exit status: as a
stage's.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Literal

from hyperpod_ft import publish
from hyperpod_ft.errors import EXIT_USER_ERROR, UserError, print_error, volume_failure
from hyperpod_ft.job import recovery, words
from hyperpod_ft.job.growth import Growth
from hyperpod_ft.job.job_host import JobHost, this_host
from hyperpod_ft.job.recovery import Decision
from hyperpod_ft.job.tracking import publishing_metrics
from hyperpod_ft.launch.slurm.client import Slurm
from hyperpod_ft.launch.slurm.programs import SlurmUnreachableError
from hyperpod_ft.processes import end
from hyperpod_ft.runs import attempts, job_files
from hyperpod_ft.runs.attempts import Attempt
from hyperpod_ft.runs.job_files import NOTICE, NOTICE_STATUS, STOP_SIGNALS, TERMINATED_STATUS, banner, shell_status
from hyperpod_ft.runs.jobs import own_job_id
from hyperpod_ft.runs.journal import Journal
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.runs.results import metrics
from hyperpod_ft.runs.run import Run

_POLL_SECONDS = 0.1
_RECORD_POLL_SECONDS = 1.0  # a file on the shared volume
_REPORT_POLL_SECONDS = 0.2  # files there that one process looks for
# How long the command may take to end once the record is written; then again between SIGTERM and SIGKILL.
_GRACE_SECONDS = 10
_CONTAINER_GRACE_SECONDS = 120  # in which Pyxis removes its files, gigabytes, from the nodes' disks
_TERMINATION_SECONDS = 5
_REQUEUE_WAIT_SECONDS = 120
# How much later than the command, or than the first report of a failure, this process may get a signal; the second when
# SIGTERM seems to have ended the command.
_SIGNAL_DELIVERY_SECONDS = 1
_TERMINATION_DELIVERY_SECONDS = 10
_REPEAT_NOTICE_SECONDS = 3  # ranks that had not started yet missed the first notice
_REQUEUE_TIMEOUT_SECONDS = 60
_REQUEUE_RETRY_SECONDS = 5


class Signals:
    """The signal this process received on its host, and the child that the notice is forwarded to."""

    grace_seconds = _GRACE_SECONDS

    def __init__(self, host: JobHost) -> None:
        self.received = 0
        self.host = host
        self.child: subprocess.Popen[bytes] | None = None
        self._attempts = 0  # of the child
        self._first_at = 0.0
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._first_at = self._first_at or time.monotonic()
        if number == signal.SIGTERM or not self.received:  # SIGTERM outranks the notice
            self.received = number
        # after SIGTERM, torchrun would kill its ranks within half a minute: they get the notice, to save
        if (number == NOTICE or self.host.only_sender) and self.child is not None and self.child.poll() is None:
            self.child.send_signal(NOTICE)

    def begin(self, command: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        """Have the child begin an attempt, or start it; forward a signal that has arrived."""
        if self.child is not None and self.child.poll() is None:
            words.say(self.child, words.begin(self._attempts))
        else:
            self.child = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
            self._attempts = 0
        self._attempts += 1
        if self.received and self.host.only_sender:
            self.child.send_signal(NOTICE)
        return self.child

    def seconds_since(self) -> float:
        """Since the first signal; 0 before it."""
        return time.monotonic() - self._first_at if self.received else 0.0

    def wait(self, seconds: float, awaited: tuple[int, ...] = STOP_SIGNALS) -> None:
        """Wait until the time is over, or one of the signals was received."""
        deadline = time.monotonic() + seconds
        while self.received not in awaited and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


def supervise(run: Run, stage: str, command: Sequence[str], signals: Signals) -> int | None:
    """Attempt the command until it succeeds or is given up; returns the exit status, None when requeued.

    Raises UserError when Slurm does not requeue the job, or when the container's image is not that of stage env.
    """
    if run.journal.is_done(stage):
        print(f"{stage}: already done, nothing to do", flush=True)
        return 0
    if run.config.env.container:
        run.journal.require_done("env", "there is no interpreter for its image")
    job_id = own_job_id()
    accelerators = run.config.instance.has_accelerators
    decide = partial(recovery.decide, allowed=run.config.cluster.max_restarts, continued_by=signals.host.continued_by)
    resumed_from, references = run.journal.last_written_step(), run.journal.references_measured()
    if signals.host.is_first_start:
        attempts.forget(run.paths, stage, job_id)
    while True:
        earlier = attempts.of_submission(run.journal, stage, job_id)
        growth = Growth(run, signals.host, earlier)
        if run.config.env.container:
            _answer_for_nodes(signals.host)
        attempt = _Running(run.journal, stage, signals, growth, earlier).attempt(command, resumed_from)
        measured = run.journal.references_measured() > references
        attempt = replace(attempt, measured=measured, grows=growth.is_due, nodes=signals.host.nodes)
        decision = decide(attempt, earlier)
        if decision.action == "retry":
            if signals.child is not None:
                words.say(signals.child, words.END)
            attempts.add(run.paths, stage, attempt)
            pause = recovery.pause_seconds(decision.number, accelerators)
            _print(stage, decision, f" in {pause} s")
            signals.wait(pause)
            if not signals.received:
                print(f"{banner(stage, job_id)}, restart {decision.number}", flush=True)
                continue
            attempt = replace(attempt, signal=signals.received)
            decision = decide(attempt, earlier)
        _print(stage, decision)
        if decision.action != "end":
            attempts.add(run.paths, stage, attempt)  # before what takes time: after SIGTERM there is little
        if signals.child is not None and attempt.failures and not attempt.signal:
            _let_end(signals.child, signals)
        if decision.action != "requeue":
            return decision.status
        if signals.received == signal.SIGTERM and not attempt.signal:
            return TERMINATED_STATUS
        _requeue(job_id, signals)
        # Slurm ends this job as soon as it can; if the script ended first, the job would count as failed
        signals.wait(_REQUEUE_WAIT_SECONDS, (signal.SIGTERM,))
        return None


def _answer_for_nodes(host: JobHost) -> None:
    """Put what nodes ask Slurm into the environment, for containers, which have no Slurm."""
    for name in (job_files.FIRST_ADDRESS, job_files.NODE_NAMES):  # an earlier answer may hold no longer
        os.environ.pop(name, None)
    with contextlib.suppress(UserError):  # without an answer the nodes fail, and the attempt is repeated
        os.environ.update(host.answers())


def _requeue(job_id: str, signals: Signals) -> None:
    """Requeue the job; try again while Slurm's controller is unreachable. Raises UserError when Slurm refuses."""
    deadline = time.monotonic() + _REQUEUE_TIMEOUT_SECONDS
    while True:
        try:
            Slurm().requeue(job_id)
        except SlurmUnreachableError:
            if time.monotonic() > deadline:
                raise
            signals.wait(_REQUEUE_RETRY_SECONDS, (signal.SIGTERM,))
            if signals.received == signal.SIGTERM:
                raise
        else:
            return


def _let_end(child: "subprocess.Popen[bytes]", signals: Signals) -> None:
    """Have the programs on the nodes end, which may still wait for a word; at once when a signal is received."""
    words.leave(child)
    deadline = time.monotonic() + signals.grace_seconds
    while child.poll() is None:
        if signals.received or time.monotonic() > deadline:
            end(child, _TERMINATION_SECONDS)
            return
        time.sleep(_POLL_SECONDS)


class _Running:
    """One attempt at the command, while it runs. `earlier`: as for `recovery.decide`."""

    def __init__(
        self, journal: Journal, stage: str, signals: Signals, growth: Growth, earlier: Sequence[Attempt]
    ) -> None:
        self._journal, self._stage, self._signals, self._growth = journal, stage, signals, growth
        self._earlier = earlier
        self._directory = journal.paths.attempt_directory(stage, own_job_id())  # for the failures that nodes report
        self._looked_at, self._failed_at, self._hung_at = 0.0, 0.0, 0.0

    def attempt(self, command: Sequence[str], resumed_from: int) -> Attempt:
        """Run the command until it has ended, or is given up."""
        publish.remove(self._directory)
        # what still ends on another node may have made it again, for its report
        self._directory.mkdir(parents=True, exist_ok=True)
        number = str(len(self._earlier))
        environment = os.environ | {job_files.ATTEMPT_DIRECTORY: str(self._directory), job_files.ATTEMPT_NUMBER: number}
        child = self._signals.begin(command, environment)
        # precompile works before and after an attempt too
        if self._stage != "train" or not self._signals.host.passes_words:
            words.leave(child)
        outlived = self._wait(child)
        recorded = outlived == "record" or self._journal.is_done(self._stage)
        if child.returncode and not recorded:
            # a job that is cancelled did not crash; after a crash, srun ends other nodes by SIGTERM too
            statuses = {
                shell_status(child.returncode),
                *(failure.status for failure in recovery.failures(self._directory)),
            }
            terminated = statuses == {TERMINATED_STATUS}
            self._signals.wait(_TERMINATION_DELIVERY_SECONDS if terminated else _SIGNAL_DELIVERY_SECONDS)
        failures = recovery.failures(self._directory) if child.returncode != 0 else ()
        if child.returncode is not None:
            status = shell_status(child.returncode)
        else:
            status = max((failure.status for failure in failures), default=NOTICE_STATUS)
        return Attempt(
            job_id=own_job_id(),
            time=utc_now(),
            status=status,
            recorded=recorded,
            failures=failures,
            signal=self._signals.received,
            resumed_from=resumed_from,
            checkpoint=self._journal.last_written_step(),
            step=metrics.last_step(self._journal.paths.metrics_path),
            left=outlived == "hang",
        )

    def _wait(self, child: "subprocess.Popen[bytes]") -> Literal["record", "hang", ""]:
        """Wait until the command has ended, its time to save is over, or ranks have failed that it can start again.

        End it when it outlives the stage's record, or a hang that is reported. Returns the record if it was seen, since
        `submit --force` may remove it while the job still ends; else the hang if the command outlived it.
        """
        stage, signals = self._stage, self._signals
        to_save = signals.host.seconds_to_save(self._journal.plan[stage].resources.notice_seconds)
        ended = False
        recorded_at, looked_at, noticed_at = 0.0, 0.0, 0.0
        while child.poll() is None:
            now = time.monotonic()
            if self._can_restart(child, now):
                break
            if not recorded_at and now - looked_at > _RECORD_POLL_SECONDS:
                looked_at = now
                recorded_at = now if self._journal.is_done(stage) else 0.0
                if recorded_at:
                    words.leave(child)
            over_since = recorded_at or self._hung_at
            if over_since and now - over_since > (signals.grace_seconds if recorded_at else _GRACE_SECONDS):
                print(f"{stage}: {'done' if recorded_at else 'hangs'}; ending what still runs on the nodes", flush=True)
                end(child, _TERMINATION_SECONDS)  # what srun leaves there when it is killed, Slurm ends with the job
                return "record" if recorded_at else "hang"
            terminated = signals.received == signal.SIGTERM
            if terminated and not ended and signals.seconds_since() > signals.host.seconds_to_end:
                child.terminate()  # only this process was signalled; a second SIGTERM would cut short the saving
                ended = True
            repeats = signals.received == NOTICE or (signals.host.only_sender and signals.received)
            if repeats and now - noticed_at > _REPEAT_NOTICE_SECONDS:
                noticed_at = now
                child.send_signal(NOTICE)
            if not signals.received and not recorded_at and self._growth.begins():
                os.kill(os.getpid(), NOTICE)  # as if the time limit were near: the ranks save
            if signals.received == NOTICE and signals.seconds_since() > to_save:
                break  # ranks hang, or a step takes longer than the time left
            time.sleep(_POLL_SECONDS)
        return "record" if recorded_at else ""

    def _can_restart(self, child: "subprocess.Popen[bytes]", now: float) -> bool:
        """Whether ranks have failed and the command can restart them. If it cannot, tell it to end."""
        if now - self._looked_at < _REPORT_POLL_SECONDS:
            return False
        self._looked_at = now
        failures = recovery.failures(self._directory)
        if not failures:
            return False
        self._failed_at = self._failed_at or now
        if any(failure.hang for failure in failures):
            self._hung_at = self._hung_at or now
        assert child.stdin is not None
        if child.stdin.closed:
            return False
        checkpoint = self._journal.last_written_step()
        if self._signals.received or not recovery.can_restart(failures, self._earlier, checkpoint):
            words.leave(child)
            return False
        return now - self._failed_at > _SIGNAL_DELIVERY_SECONDS


def _print(stage: str, decision: Decision, more: str = "") -> None:
    if decision.message:
        mark = "error: " if decision.status == EXIT_USER_ERROR else ""
        print(f"{mark}{stage}: {decision.message}{more}", flush=True)


def main() -> int:
    """Run the command line; returns the exit status, and leaves it on the shared volume as every script does."""
    stage, directory, *command = sys.argv[1:]
    host = this_host()
    command = host.on_every_host(command, stage, directory)
    if stage == "precompile":  # on the first node, around the trial on all
        command = [sys.executable, "-m", "hyperpod_ft.stages.precompile", directory, *command]
    signals = Signals(host)
    try:
        run = Run.open(Path(directory))
    except UserError as error:
        print_error(stage, str(error))
        return EXIT_USER_ERROR
    if run.config.env.container:
        signals.grace_seconds = _CONTAINER_GRACE_SECONDS
    marker = run.paths.exit_marker(stage, own_job_id())
    publish.remove(marker)  # left before the job was requeued
    with publishing_metrics(run) if stage == "train" else contextlib.nullcontext():
        try:
            status = supervise(run, stage, command, signals)
        except UserError as error:
            print_error(stage, str(error))
            status = EXIT_USER_ERROR
        except BaseException as error:
            # this process replaced the script: only it can end the ranks and record the exit status
            if signals.child is not None and signals.child.poll() is None:
                signals.child.terminate()
            _leave(marker, 1)  # what follows may raise the error again
            if not isinstance(error, OSError):
                raise
            message, status = volume_failure(error)
            print_error(stage, message)
    if status is None:  # it has not ended
        return TERMINATED_STATUS
    _leave(marker, status)
    if status != TERMINATED_STATUS:  # Slurm may start it again
        for name in [stage] if status == 0 else run.plan.needing(stage):
            publish.remove(run.paths.secrets(name))
    return status


def _leave(marker: Path, status: int) -> None:
    """Leave the exit status, if the volume takes it: an error here would hide what the stage has come to."""
    with contextlib.suppress(OSError):
        publish.write_text(marker, f"{status}\n")


if __name__ == "__main__":
    sys.exit(main())
