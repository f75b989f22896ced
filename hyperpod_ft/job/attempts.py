"""One attempt at a training: how it ended, and what the supervisor does next.

Each node that failed leaves an `Ending`, because the exit statuses of torchrun (always 1) and srun (the highest) hide
which rank failed first. `decide` is a pure function of them. An attempt that is followed by another is added to the
run's restarts (runs/restarts.py), where a requeued job finds how many there were.
"""

import contextlib
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from hyperpod_ft import publish
from hyperpod_ft.errors import EXIT_USER_ERROR
from hyperpod_ft.runs import metrics
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.runs.restarts import Restart
from hyperpod_ft.runs.run import Run

# The environment variable that holds the directory for the endings and node reports of one attempt.
ATTEMPT_DIRECTORY = "HYPERPOD_FT_ATTEMPT"
# Exit statuses as a shell reports them for a process that the signal ended.
NOTICE_STATUS = 128 + signal.SIGUSR1  # of the time limit
TERMINATED_STATUS = 128 + signal.SIGTERM

_SIGNAL_NAMES = {known.value: known.name for known in signal.Signals}
_LONGEST_PAUSE_SECONDS = 300


@dataclass(frozen=True)
class Ending:
    """How the processes of one node failed."""

    node: str
    rank: int | None  # that failed first; None: no rank was started, because the node is unfit
    status: int  # as a shell reports it: 128 + N for signal N
    time: float  # Unix time, seconds

    def write(self, directory: Path) -> None:
        """Leave it for the supervisor of the job."""
        publish.write_json(directory / f"ending-{step_number()}-{self.node}.json", asdict(self))

    @staticmethod
    def write_here(rank: int | None, status: int, moment: float) -> None:
        """Leave the ending of this node, if a supervisor started it."""
        if directory := os.environ.get(ATTEMPT_DIRECTORY):
            # an error about a full volume must not be hidden by this one
            with contextlib.suppress(OSError):
                Ending(node_name(), rank, status, moment).write(Path(directory))


def endings(directory: Path) -> tuple[Ending, ...]:
    """The endings of an attempt, of its last job step if HyperPod's plugin started several.

    Damaged files are ignored.
    """
    steps: dict[int, list[Ending]] = {}
    for path in directory.glob("ending-*-*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            ending = Ending(**json.loads(path.read_text(encoding="utf-8")))
            steps.setdefault(int(path.name.split("-")[1]), []).append(ending)
    return tuple(steps[max(steps)]) if steps else ()


def step_number() -> int:
    """The Slurm job step that this process belongs to; 0 without Slurm."""
    return int(os.environ.get("SLURM_STEP_ID", "0"))


@dataclass(frozen=True)
class Outcome:
    """One attempt that has ended, or was still running when its time was up."""

    status: int  # exit status of its command
    recorded: bool  # the stage's record is written: the stage is done, however its processes ended
    endings: tuple[Ending, ...]
    signal: int  # that asked the job to stop; 0: none
    begun_at: int  # step of the newest checkpoint when the job began; 0: none
    checkpoint: int  # the same, now
    step: int  # the last one that was logged

    @property
    def cause(self) -> Ending | None:
        """A user's error if there is one, else the first failure. Clocks of nodes may differ a little.

        Among failures within one second, an exit status of 1 comes last: it may be a peer's echo of another failure.
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
            return f"exit {self.status} at step {self.step}, and no rank reported why"
        ended = _SIGNAL_NAMES.get(cause.status - 128, f"exit {cause.status}")
        return f"rank {cause.rank}: {ended} at step {self.step}"


@dataclass(frozen=True)
class Decision:
    """The supervisor's action after an attempt."""

    action: Literal["end", "retry", "requeue"]
    status: int = 0  # exit status of the job, for `end`
    message: str = ""
    cause: Literal["crash", "time limit"] = "crash"
    number: int = 0  # of this restart after a crash, from 1


def decide(outcome: Outcome, earlier: Sequence[Restart], allowed: int, requeues: bool) -> Decision:
    """Choose what follows an attempt. `earlier`: the job's restarts so far; `allowed`: cluster.max_restarts.

    `requeues`: whether a Slurm can start the job again. The stage's record ends the job with success. A user's error
    and a cancellation end it too. The notice of the time limit requeues it, as long as each time adds a checkpoint. A
    crash is retried within the job, or by requeueing when no rank reported a reason, because a node may be gone. A
    crash that repeats itself is not retried.
    """
    if outcome.status == 0 or outcome.recorded:
        return Decision("end")
    if outcome.signal == signal.SIGTERM:
        return Decision("end", TERMINATED_STATUS)
    cause = outcome.cause
    status = cause.status if cause else outcome.status
    if status == EXIT_USER_ERROR:
        return Decision("end", EXIT_USER_ERROR)
    if outcome.signal == signal.SIGUSR1 or (cause and cause.status == NOTICE_STATUS):
        return _after_notice(outcome, requeues)
    crashes = [restart for restart in earlier if restart.cause == "crash"]
    if len(crashes) >= allowed:
        tried = f" after {len(crashes)} restarts" if crashes else ""
        return Decision("end", status, f"{outcome.reason}{tried} (cluster.max_restarts: {allowed})")
    if crashes and cause and (crashes[-1].reason, crashes[-1].checkpoint) == (outcome.reason, outcome.checkpoint):
        return Decision("end", status, f"{outcome.reason}, same as the last crash, with no new checkpoint since")
    number = len(crashes) + 1
    message = f"{outcome.reason}; restart {number} of {allowed}"
    return Decision("requeue" if cause is None and requeues else "retry", message=message, number=number)


def _after_notice(outcome: Outcome, requeues: bool) -> Decision:
    if not requeues:
        return Decision("end", NOTICE_STATUS)
    if outcome.checkpoint == outcome.begun_at:
        return Decision(
            "end",
            EXIT_USER_ERROR,
            "cluster.time_limit: the job is close to its time limit and has not saved a checkpoint;"
            " raise the limit, or lower training.save_every_steps",
        )
    message = f"close to the time limit; the job is requeued and resumes from step {outcome.checkpoint}"
    return Decision("requeue", message=message, cause="time limit")


def pause_seconds(number: int, accelerators: bool) -> int:
    """How long to wait before the restart of that number: twice as long each time.

    The Neuron runtime takes some seconds to release devices; CPUs need none.
    """
    return min((15 if accelerators else 1) << (number - 1), _LONGEST_PAUSE_SECONDS)


def restart_of(job_id: str, outcome: Outcome, decision: Decision) -> Restart:
    """The restart that follows an outcome, as the run's history keeps it."""
    reason = outcome.reason if decision.cause == "crash" else "time limit"
    return Restart(job_id, utc_now(), decision.cause, reason, outcome.step, outcome.checkpoint)


def newest_checkpoint(run: Run) -> int:
    """Step of the checkpoint that was written last; 0 when there is none.

    Not the highest step: when a checkpoint is damaged, training resumes from an earlier one.
    """
    written = []
    for step, path in run.checkpoints_by_step().items():
        with contextlib.suppress(OSError):  # deleted meanwhile
            written.append((path.stat().st_mtime_ns, step))
    return max(written, default=(0, 0))[1]


def last_step(run: Run) -> int:
    """The last step in metrics.jsonl; 0 when there is none."""
    row = metrics.last_row(run.metrics)
    return int(row["step"]) if row else 0


def node_name() -> str:
    """This node's name in Slurm, or else its host name."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename
