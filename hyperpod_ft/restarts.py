"""Attempts at a training that were cut short: what ended them, whether another follows, and what is remembered.

What runs on a node leaves an `Ending`, since the exit statuses of torchrun (always 1) and srun (the highest) hide
which rank failed first. `decide` weighs them. Each attempt that another followed is a `Restart` in the run's
directory, where requeued jobs find how many there were.
"""

import json
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from hyperpod_ft import publish
from hyperpod_ft.errors import EXIT_USER_ERROR
from hyperpod_ft.run import ISO_UTC, Run

# Names the directory that the endings and node reports of one attempt lie in, made empty for each.
ATTEMPT_DIRECTORY = "HYPERPOD_FT_ATTEMPT"
# Statuses as a shell gives them for a process that the signal ended.
NOTICE_STATUS = 128 + signal.SIGUSR1  # of the time limit
TERMINATED_STATUS = 128 + signal.SIGTERM

_CHECKPOINT = re.compile(r"step-(\d{8})")
_LONGEST_PAUSE_SECONDS = 300


@dataclass(frozen=True)
class Ending:
    """How the processes of one node ended, when not well."""

    node: str
    rank: int | None  # that failed first; None: none was started, since the node is not fit
    status: int  # as a shell gives it: 128 + N for signal N
    time: float  # Unix time, seconds

    def leave(self, directory: Path) -> None:
        """Write it down for the supervisor of the job."""
        publish.write_json(directory / f"ending-{step_number()}-{self.node}.json", asdict(self))

    @staticmethod
    def leave_here(rank: int | None, status: int, moment: float) -> None:
        """The ending of this node, where there is a supervisor to read it."""
        if directory := os.environ.get(ATTEMPT_DIRECTORY):
            Ending(node_name(), rank, status, moment).leave(Path(directory))


def endings(directory: Path) -> tuple[Ending, ...]:
    """What the nodes of an attempt left: of its last step, if HyperPod's plugin started several."""
    steps: dict[int, list[Path]] = {}
    for path in directory.glob("ending-*-*.json"):
        steps.setdefault(int(path.name.split("-")[1]), []).append(path)
    last = steps[max(steps)] if steps else []
    return tuple(Ending(**json.loads(path.read_text(encoding="utf-8"))) for path in last)


def step_number() -> int:
    """Of the job step that this process belongs to."""
    return int(os.environ.get("SLURM_STEP_ID", "0"))


@dataclass(frozen=True)
class Attempt:
    """One attempt that has ended, or was still at work when its time was up."""

    status: int  # of its command
    endings: tuple[Ending, ...]
    told: int  # the signal that told the job to stop; 0: none
    begun_at: int  # step of the newest checkpoint when the job began
    checkpoint: int  # the same, now; 0: none
    step: int  # the last one that was logged

    @property
    def cause(self) -> Ending | None:
        """The failure that came first; within a second, not an exit with 1, which may be a peer's echo of it."""
        return min(self.endings, key=lambda ending: (int(ending.time), ending.status == 1), default=None)

    @property
    def reason(self) -> str:
        """For example `rank 3: exit 1 at step 12`."""
        cause = self.cause
        if cause is None or cause.rank is None:
            return f"exit {self.status} at step {self.step}, and no rank said why"
        ended = signal.Signals(cause.status - 128).name if cause.status > 128 else f"exit {cause.status}"
        return f"rank {cause.rank}: {ended} at step {self.step}"


@dataclass(frozen=True)
class Restart:
    """An attempt that was followed by another."""

    job_id: str
    time: str  # ISO 8601, UTC
    cause: Literal["crash", "time limit"]
    reason: str
    step: int
    checkpoint: int


@dataclass(frozen=True)
class Decision:
    """What follows an attempt."""

    what: Literal["end", "retry", "requeue"]
    status: int = 0  # to end with
    words: str = ""
    cause: Literal["crash", "time limit"] = "crash"
    number: int = 0  # of this restart, from 1, when it is one of a crash


def decide(attempt: Attempt, earlier: Sequence[Restart], allowed: int, requeues: bool) -> Decision:
    """What follows an attempt. `earlier`: the job's restarts so far; `allowed`: cluster.max_restarts.

    `requeues`: whether there is a Slurm that can start the job again. A user's error and a cancellation end the job.
    The notice of the time limit requeues it, as long as each time brings a new checkpoint. A crash is retried here,
    or by requeueing where no rank could say what happened, since a node may be gone; not one that repeats itself.
    """
    if attempt.status == 0:
        return Decision("end")
    if attempt.told == signal.SIGTERM:
        return Decision("end", TERMINATED_STATUS)
    cause = attempt.cause
    if (cause.status if cause else attempt.status) == EXIT_USER_ERROR:
        return Decision("end", EXIT_USER_ERROR)
    if attempt.told == signal.SIGUSR1 or (cause and cause.status == NOTICE_STATUS):
        return _after_notice(attempt, requeues)
    crashes = [restart for restart in earlier if restart.cause == "crash"]
    status = cause.status if cause else attempt.status
    if len(crashes) >= allowed:
        tried = f" after {len(crashes)} restarts" if crashes else ""
        return Decision("end", status, f"{attempt.reason}{tried} (cluster.max_restarts: {allowed})")
    if crashes and cause and (crashes[-1].reason, crashes[-1].checkpoint) == (attempt.reason, attempt.checkpoint):
        return Decision("end", status, f"{attempt.reason}, as the last time, without a new checkpoint between")
    number = len(crashes) + 1
    lost = cause is None and requeues
    words = f"{attempt.reason}; restart {number} of {allowed}"
    return Decision("requeue" if lost else "retry", words=words, number=number)


def _after_notice(attempt: Attempt, requeues: bool) -> Decision:
    if not requeues:
        return Decision("end", NOTICE_STATUS)
    if attempt.checkpoint <= attempt.begun_at:
        return Decision(
            "end",
            EXIT_USER_ERROR,
            "cluster.time_limit: the job is nearly out of time, and has saved no checkpoint since it began;"
            " raise the limit, or lower training.save_every_steps",
        )
    words = f"nearly out of time; the job is requeued and goes on from step {attempt.checkpoint}"
    return Decision("requeue", words=words, cause="time limit")


def pause_seconds(number: int, accelerators: bool) -> int:
    """How long to wait before the restart of that number: twice as long each time.

    The Neuron runtime takes some seconds to give devices back; CPUs need no rest.
    """
    return min((15 if accelerators else 1) << (number - 1), _LONGEST_PAUSE_SECONDS)


def history(run: Run, stage: str) -> list[Restart]:
    """Every restart of a stage of the run, oldest first; none when the file is not there, or cannot be read."""
    try:
        return [Restart(**entry) for entry in json.loads(run.restarts(stage).read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []


def remember(run: Run, stage: str, job_id: str, attempt: Attempt, decision: Decision) -> None:
    """Add the attempt to the history."""
    reason = attempt.reason if decision.cause == "crash" else "time limit"
    moment = time.strftime(ISO_UTC, time.gmtime())
    restart = Restart(job_id, moment, decision.cause, reason, attempt.step, attempt.checkpoint)
    publish.write_json(run.restarts(stage), [asdict(known) for known in [*history(run, stage), restart]])


def describe(restarts: Sequence[Restart], allowed: int) -> str:
    """A job's restarts in words: `restart 1 of 3 (rank 3: exit 1 at step 12), requeued once at its time limit`."""
    crashes = [restart for restart in restarts if restart.cause == "crash"]
    requeued = len(restarts) - len(crashes)
    parts = []
    if crashes:
        parts.append(f"restart {len(crashes)} of {allowed} ({crashes[-1].reason})")
    if requeued:
        parts.append(f"requeued {'once' if requeued == 1 else f'{requeued} times'} at its time limit")
    return ", ".join(parts)


def newest_checkpoint(run: Run) -> int:
    """Step of the newest checkpoint; 0 when there is none. One that has its name is complete."""
    found = (_CHECKPOINT.fullmatch(path.name) for path in run.checkpoints.glob("step-*"))
    return max((int(match[1]) for match in found if match), default=0)


def last_step(run: Run) -> int:
    """The last step in metrics.jsonl; 0 when there is none."""
    try:
        lines = run.metrics.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):  # cut short by a kill
            continue
    return 0


def node_name() -> str:
    """This node as Slurm calls it, or else as it calls itself."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename
