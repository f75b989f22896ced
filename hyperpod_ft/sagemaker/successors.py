"""Whether a training job that ended without the records of its stages is followed by another. Pure functions.

`job/recovery.decide` judges crashes inside a container. Here is what only the client can see: how the job itself ended.
"""

import re
from collections.abc import Collection, Sequence
from typing import Literal

from hyperpod_ft.runs.attempts import Attempt
from hyperpod_ft.runs.job_files import KILLED_STATUS, TERMINATED_STATUS
from hyperpod_ft.sagemaker.training_jobs import TrainingJob

# The beginning of a FailureReason that is about SageMaker and not about the job.
_INTERNAL_ERROR = "InternalServerError"
# The FailureReason of a container that was killed before it could write one: SageMaker has only its exit status.
_KILLED = re.compile(rf"(AlgorithmError:)?[\s,]*exit code: {KILLED_STATUS}\b.*")

Successor = Literal["none", "continuation", "restart"]


def decide_successor(
    found: TrainingJob, exit_statuses: Collection[int], restarts: Sequence[Attempt], allowed: int
) -> Successor:
    """Decide what follows a training job when stages of it have no records.

    `continuation` of a job that saved a checkpoint and left before its time limit; `restart` of one that was killed or
    lost its instances, so that nothing in it could report why; `none` for a job that failed for a reason, that was
    stopped, that never got instances, or that is still running.

    `exit_statuses`: that the stages without records left. `restarts`: of all jobs of the submission, oldest first;
    `allowed`: how many of them may be crashes or losses (cluster.max_restarts).
    """
    of_job = [restart for restart in restarts if restart.job_id == found.name]
    if of_job and of_job[-1].cause == "time limit":
        return "continuation"
    if not _was_lost(found, exit_statuses):
        return "none"
    used = sum(restart.cause == "crash" for restart in restarts)
    return "restart" if used < allowed else "none"


def _was_lost(found: TrainingJob, exit_statuses: Collection[int]) -> bool:
    """Whether SageMaker, and not a stage or the container, ended a job that had begun."""
    internal = found.state.reason.startswith(_INTERNAL_ERROR)
    by_sagemaker = found.state.state == "TIMEOUT" or (found.state.state == "FAILED" and internal)
    killed = found.state.state == "FAILED" and _KILLED.fullmatch(found.state.reason) is not None
    # SIGTERM is what SageMaker sends at the job's limit
    harmless = {0, TERMINATED_STATUS} if by_sagemaker else {0}
    return found.began and (by_sagemaker or killed) and set(exit_statuses) <= harmless
