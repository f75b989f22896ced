"""Attempts at a training that were cut short: what ended them, whether another follows, and what is remembered.

What runs on a node leaves an `Ending`, since the exit statuses of torchrun (always 1) and srun (the highest) hide
which rank failed first. `decide` weighs them. Each attempt that another followed is a `Restart` in the run's
directory, where requeued jobs find how many there were.
"""

import contextlib
import json
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from hyperpod_ft import publish
from hyperpod_ft.errors import EXIT_USER_ERROR
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.runs.run import Run

# Names the directory that the endings and node reports of one attempt lie in, made empty for each.
ATTEMPT_DIRECTORY = "HYPERPOD_FT_ATTEMPT"
# Statuses as a shell gives them for a process that the signal ended.
NOTICE_STATUS = 128 + signal.SIGUSR1  # of the time limit
TERMINATED_STATUS = 128 + signal.SIGTERM

_CHECKPOINT = re.compile(r"step-(\d{8})")
_SIGNAL_NAMES = {known.value: known.name for known in signal.Signals}
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
            # a full volume must not hide what it is about
            with contextlib.suppress(OSError):
                Ending(node_name(), rank, status, moment).leave(Path(directory))


def endings(directory: Path) -> tuple[Ending, ...]:
    """What the nodes of an attempt left, of its last step if HyperPod's plugin started several.

    Damaged files do not count.
    """
    steps: dict[int, list[Ending]] = {}
    for path in directory.glob("ending-*-*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            ending = Ending(**json.loads(path.read_text(encoding="utf-8")))
            steps.setdefault(int(path.name.split("-")[1]), []).append(ending)
    return tuple(steps[max(steps)]) if steps else ()


def step_number() -> int:
    """Of the job step that this process belongs to."""
    return int(os.environ.get("SLURM_STEP_ID", "0"))


@dataclass(frozen=True)
class Outcome:
    """One attempt that has ended, or was still at work when its time was up."""

    status: int  # of its command
    endings: tuple[Ending, ...]
    told: int  # the signal that told the job to stop; 0: none
    begun_at: int  # step of the checkpoint that had been written last when the job began
    checkpoint: int  # the same, now; 0: none
    step: int  # the last one that was logged

    @property
    def cause(self) -> Ending | None:
        """A user's error if there is one, else the failure that came first, by clocks that may differ a little.

        Within a second, not an exit with 1, which may be a peer's echo of it.
        """
        return min(
            self.endings,
            key=lambda ending: (ending.status != EXIT_USER_ERROR, int(ending.time), ending.status == 1),
            default=None,
        )

    @property
    def reason(self) -> str:
        """For example `rank 3: exit 1 at step 12`."""
        cause = self.cause
        if cause is None or cause.rank is None:
            return f"exit {self.status} at step {self.step}, and no rank said why"
        ended = _SIGNAL_NAMES.get(cause.status - 128, f"exit {cause.status}")
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
    """What follows an outcome."""

    what: Literal["end", "retry", "requeue"]
    status: int = 0  # to end with
    words: str = ""
    cause: Literal["crash", "time limit"] = "crash"
    number: int = 0  # of this restart, from 1, when it is one of a crash


def decide(outcome: Outcome, earlier: Sequence[Restart], allowed: int, requeues: bool) -> Decision:
    """What follows an outcome. `earlier`: the job's restarts so far; `allowed`: cluster.max_restarts.

    `requeues`: whether there is a Slurm that can start the job again. A user's error and a cancellation end the job.
    The notice of the time limit requeues it, as long as each time brings a new checkpoint. A crash is retried here,
    or by requeueing where no rank could say what happened, since a node may be gone; not one that repeats itself.
    """
    if outcome.status == 0:
        return Decision("end")
    if outcome.told == signal.SIGTERM:
        return Decision("end", TERMINATED_STATUS)
    cause = outcome.cause
    if (cause.status if cause else outcome.status) == EXIT_USER_ERROR:
        return Decision("end", EXIT_USER_ERROR)
    if outcome.told == signal.SIGUSR1 or (cause and cause.status == NOTICE_STATUS):
        return _after_notice(outcome, requeues)
    crashes = [restart for restart in earlier if restart.cause == "crash"]
    status = cause.status if cause else outcome.status
    if len(crashes) >= allowed:
        tried = f" after {len(crashes)} restarts" if crashes else ""
        return Decision("end", status, f"{outcome.reason}{tried} (cluster.max_restarts: {allowed})")
    if crashes and cause and (crashes[-1].reason, crashes[-1].checkpoint) == (outcome.reason, outcome.checkpoint):
        return Decision("end", status, f"{outcome.reason}, as the last time, without a new checkpoint between")
    number = len(crashes) + 1
    lost = cause is None and requeues
    words = f"{outcome.reason}; restart {number} of {allowed}"
    return Decision("requeue" if lost else "retry", words=words, number=number)


def _after_notice(outcome: Outcome, requeues: bool) -> Decision:
    if not requeues:
        return Decision("end", NOTICE_STATUS)
    if outcome.checkpoint == outcome.begun_at:
        return Decision(
            "end",
            EXIT_USER_ERROR,
            "cluster.time_limit: the job is nearly out of time, and has saved no checkpoint since it began;"
            " raise the limit, or lower training.save_every_steps",
        )
    words = f"nearly out of time; the job is requeued and goes on from step {outcome.checkpoint}"
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


def forget(run: Run, stage: str, job_id: str) -> None:
    """Drop what is known of an earlier job of the same id: of another Slurm, or started by hand."""
    known = history(run, stage)
    if any(restart.job_id == job_id for restart in known):
        publish.write_json(run.restarts(stage), [asdict(restart) for restart in known if restart.job_id != job_id])


def remember(run: Run, stage: str, job_id: str, outcome: Outcome, decision: Decision) -> None:
    """Add the attempt to the history."""
    reason = outcome.reason if decision.cause == "crash" else "time limit"
    restart = Restart(job_id, utc_now(), decision.cause, reason, outcome.step, outcome.checkpoint)
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
    """Step of the checkpoint that was written last; 0 when there is none.

    Not the highest: training goes back behind one that it finds damaged.
    """
    written = []
    for path in run.checkpoints.glob("step-*"):
        if match := _CHECKPOINT.fullmatch(path.name):
            with contextlib.suppress(OSError):
                written.append((path.stat().st_mtime_ns, int(match[1])))
    return max(written, default=(0, 0))[1]


def last_step(run: Run) -> int:
    """The last step in metrics.jsonl; 0 when there is none."""
    try:
        lines = run.metrics.read_text(encoding="utf-8", errors="replace").splitlines()
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
