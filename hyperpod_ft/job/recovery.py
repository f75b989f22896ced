"""What the supervisor does after an attempt at a training run, and what it knows about the attempt.

Each node that failed reports a `NodeFailure`, because the exit statuses of torchrun (always 1) and srun (the highest)
hide which rank failed first. `decide` is a pure function of them. An attempt that is followed by another is added to
the run's file of attempts (runs/attempts.py), where a requeued job finds how many restarts there were.
"""

import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from hyperpod_ft import publish
from hyperpod_ft.errors import EXIT_USER_ERROR
from hyperpod_ft.job.job_host import ContinuedBy, this_host
from hyperpod_ft.runs.attempts import Attempt, NodeFailure
from hyperpod_ft.runs.job_files import ATTEMPT_DIRECTORY, NOTICE_STATUS, TERMINATED_STATUS

_MAX_PAUSE_SECONDS = 300
_NODE_FAILURE = TypeAdapter(NodeFailure)


def report_failure(rank: int | None, status: int, moment: float, hang: str = "", node: str = "") -> None:
    """Report the failure of this node, or of another `node`, to the supervisor of the job, if there is one.

    See `NodeFailure`.
    """
    if directory := os.environ.get(ATTEMPT_DIRECTORY):
        host = this_host()
        failure = NodeFailure(node or host.name, rank, status, moment, hang)
        # an error about a full volume must not be hidden by this one
        with contextlib.suppress(OSError):
            publish.write_json(Path(directory) / f"failure-{host.attempt}-{host.name}.json", asdict(failure))


def failures(directory: Path) -> tuple[NodeFailure, ...]:
    """The failures in an attempt; in the last one, if HyperPod's plugin started the job step again.

    Damaged files are ignored.
    """
    attempts: dict[int, list[NodeFailure]] = {}
    for path in directory.glob("failure-*-*.json"):
        with contextlib.suppress(OSError, ValidationError):
            failure = _NODE_FAILURE.validate_json(path.read_bytes())
            attempts.setdefault(int(path.name.split("-")[1]), []).append(failure)
    return tuple(attempts[max(attempts)]) if attempts else ()


@dataclass(frozen=True)
class Decision:
    """The supervisor's action after an attempt."""

    action: Literal["end", "retry", "requeue", "leave"]
    status: int = 0  # exit status of the job, for `end` and `leave`
    message: str = ""
    number: int = 0  # of this restart after a crash, from 1


def decide(attempt: Attempt, earlier: Sequence[Attempt], allowed: int, continued_by: ContinuedBy) -> Decision:
    """Choose what follows an attempt. `earlier`: restarts of its submission so far; `allowed`: cluster.max_restarts.

    `continued_by`: what continues the work after this job: Slurm, which requeues it, or another training job.
    The stage's record ends the job with success. A user's error and a cancellation end it too. The notice of the time
    limit requeues it or leaves the rest to the next job, as long as each time adds a checkpoint, or a part of DPO's
    reference. A crash, or a hang, is retried within the job, or by requeueing when no rank reported a reason or one is
    left, because a node may be gone. A crash that repeats itself is not retried.
    """
    if attempt.status == 0 or attempt.recorded:
        return Decision("end")
    if attempt.signal == signal.SIGTERM:
        return Decision("end", TERMINATED_STATUS)
    first = attempt.first_failure
    status = first.status if first else attempt.status
    if status == EXIT_USER_ERROR:
        return Decision("end", EXIT_USER_ERROR)
    if attempt.cause == "more nodes":
        resumes = f"resumes from step {attempt.checkpoint}"
        return Decision("requeue", message=f"nodes are idle again; the job is requeued and {resumes}")
    if attempt.cause == "time limit":
        return _after_notice(attempt, continued_by)
    crashes = [restart for restart in earlier if restart.cause == "crash"]
    if len(crashes) >= allowed:
        tried = f" after {len(crashes)} restarts" if crashes else ""
        return Decision("end", status, f"{attempt.reason}{tried} (cluster.max_restarts: {allowed})")
    if crashes and first and (crashes[-1].reason, crashes[-1].checkpoint) == (attempt.reason, attempt.checkpoint):
        return Decision("end", status, f"{attempt.reason}, same as the last crash, with no new checkpoint since")
    number = len(crashes) + 1
    message = f"{attempt.reason}; restart {number} of {allowed}"
    requeue = (first is None or attempt.left) and continued_by == "Slurm"
    return Decision("requeue" if requeue else "retry", message=message, number=number)


def can_restart(failures: Sequence[NodeFailure], earlier: Sequence[Attempt], checkpoint: int) -> bool:
    """Whether a job step whose ranks have failed may start them again.

    `earlier` as for `decide`; `checkpoint`: the step of the newest. Otherwise the job step ends, and all is started
    anew. So it is after a second crash without a new checkpoint: HyperPod's plugin then looks at the nodes, and may
    replace one; and after a hang, since what hangs may not end.
    """
    decided = {EXIT_USER_ERROR, NOTICE_STATUS, TERMINATED_STATUS}
    if any(failure.rank is None or failure.hang or failure.status in decided for failure in failures):
        return False
    crashes = [restart for restart in earlier if restart.cause == "crash"]
    return not (crashes and crashes[-1].checkpoint == checkpoint)


def _after_notice(attempt: Attempt, continued_by: ContinuedBy) -> Decision:
    if continued_by == "nothing":
        return Decision("end", NOTICE_STATUS)
    if attempt.checkpoint != attempt.resumed_from:
        resumes = f"resumes from step {attempt.checkpoint}"
    elif attempt.measured:
        resumes = "measures the rest of the reference"
    else:
        stepped = attempt.step > attempt.resumed_from
        problem = "has not saved a checkpoint" if stepped else "has not completed a step"
        remedy = "raise the limit, or lower training.save_every_steps" if stepped else "raise the limit"
        message = f"cluster.time_limit: the job is close to its time limit and {problem}; {remedy}"
        return Decision("end", EXIT_USER_ERROR, message)
    if continued_by == "next job":
        return Decision("leave", NOTICE_STATUS, f"close to the time limit; the next job {resumes}")
    return Decision("requeue", message=f"close to the time limit; the job is requeued and {resumes}")


def pause_seconds(number: int, accelerators: bool) -> int:
    """How long to wait before the restart of that number: twice as long each time.

    The Neuron runtime takes some seconds to release devices; CPUs need none.
    """
    return min((15 if accelerators else 1) << (number - 1), _MAX_PAUSE_SECONDS)
