"""Which training job of a run comes next, and creating it.

Training jobs know no dependencies. A submission records all its jobs at once, under the names they will have; `advance`
creates the first one whose stages have no records yet. It reads the current state each time and is idempotent:
a submission, `watch` and, at its end, a container call it, also at the same time,
because SageMaker refuses a second job of the same name.

A job that ended without the records of its stages may be followed by another. `job/recovery.decide` judges crashes
inside a container; `decide_successor` what only the client can see: how the job itself ended.
"""

import contextlib
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.interface import JobState
from hyperpod_ft.runs import attempts
from hyperpod_ft.runs.attempts import Attempt
from hyperpod_ft.runs.job_files import KILLED_STATUS, TERMINATED_STATUS
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.journal import Journal
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.runs.results import metrics
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker.groups import (
    RecordedJob,
    StageGroup,
    job_name,
    recorded_jobs,
    run_files_digest,
    training_jobs,
)
from hyperpod_ft.sagemaker.section import SAGEMAKER
from hyperpod_ft.sagemaker.store.sync import RunSync
from hyperpod_ft.sagemaker.training_jobs import TrainingJob, TrainingJobs
from hyperpod_ft.sagemaker.training_request import create_training_job

# The beginning of a FailureReason that is about SageMaker and not about the job.
_INTERNAL_ERROR = "InternalServerError"
# The FailureReason of a container that was killed before it could write one: SageMaker has only its exit status.
_KILLED = re.compile(rf"(AlgorithmError:)?[\s,]*exit code: {KILLED_STATUS}\b.*")

_DUE = "due; if the container before it did not create it, hyperpod-ft watch does"

Successor = Literal["none", "continuation", "restart"]


def advance(run: Run, jobs: TrainingJobs, sync: RunSync, leaving: str = "") -> str | None:
    """Create the training job whose turn it is; returns its name, None if there is nothing to create.

    `leaving`: the job whose container calls this at its end, and which SageMaker still lists as running. Raises
    UserError when SageMaker refuses, for example because of a quota.
    """
    sync.refresh()
    for job in recorded_jobs(run):
        left = _left(run.journal, job)
        if not left:
            continue
        if is_cancelled(run, job.name):
            return None
        found = jobs.find(job.name)
        if found is not None and found.state.active and job.name != leaving:
            return None
        if not (all(run.paths.script(stage).exists() for stage in left) and sync.has_run_files()):
            return None  # another machine has submitted the run: its containers would run other scripts than these
        next_job = job if found is None else _add_successor(run, job, found, left, sync)
        if next_job is None or not _create(run, jobs, next_job, left):
            return None
        with contextlib.suppress(UserError):  # the job is there, whether marks can be seen or not
            sync.refresh()
        if any(is_cancelled(run, known.name) for known in (job, next_job)):
            # `cancel` may have looked for jobs to stop before this one was there
            jobs.stop(next_job.name)
            return None
        return next_job.name
    return None


def is_cancelled(run: Run, name: str) -> bool:
    """Whether a job was cancelled, or one of its submission that it continues."""
    known = training_jobs(run)
    same = {(job.stage, job.submitted) for job in known if job.job_id == name}
    return any(
        run.paths.cancel_marker(job.stage, job.job_id).exists() for job in known if (job.stage, job.submitted) in same
    )


def states(run: Run, jobs: TrainingJobs) -> dict[str, JobState]:
    """The states of the newest submission's training jobs, by name, of those that have stages left."""
    found: dict[str, JobState] = {}
    awaited = ended = ""
    for job in recorded_jobs(run):
        if not _left(run.journal, job):
            continue
        known = jobs.find(job.name)
        if known is not None:
            state = known.state
        elif is_cancelled(run, job.name):
            state = JobState("CANCELLED")
        elif ended:
            state = JobState("CANCELLED", f"{ended} did not finish its stages")
        else:
            state = JobState("PENDING", f"after {awaited}" if awaited else _DUE)
        found[job.name] = state
        if state.active:
            awaited = job.name
        else:
            ended = job.name
    return found


def _left(journal: Journal, job: RecordedJob) -> list[str]:
    return [stage for stage in job.stages if stage in journal.plan and not journal.is_done(stage)]


def _create(run: Run, jobs: TrainingJobs, job: RecordedJob, stages: list[str]) -> bool:
    group = StageGroup(job.group, tuple(run.plan[stage] for stage in stages))
    return jobs.create(create_training_job(run, group, job.name, job.code, run_files_digest(run.paths.directory)))


def _add_successor(
    run: Run, job: RecordedJob, found: TrainingJob, left: list[str], sync: RunSync
) -> RecordedJob | None:
    """Record the job that follows an ended one, counting it as a restart if it is one. Returns None if none follows."""
    stage = next((stage for stage in left if run.plan[stage].starts_ranks), None)
    if stage is None:
        return None  # CPU stages are not repeated
    known = attempts.of_submission(run.journal, stage, job.name)
    exits = [status for name in left if (status := run.journal.exit_status(name, job.name)) is not None]
    decision = decide_successor(found, exits, known, run.config.cluster.max_restarts)
    if decision == "none":
        return None
    successor = replace(job, name=job_name(run, job.group, job.number + 1), number=job.number + 1)
    for name in left:
        run.journal.add_job(Job(name, successor.name, SAGEMAKER, job.submitted, code=job.code))
    if decision == "restart":
        attempts.add(run.paths, stage, _lost(run.journal, job))
    sync.push([run.paths.jobs_path, *(path for name in left if (path := run.paths.restarts_path(name)).exists())])
    return successor


def _lost(journal: Journal, job: RecordedJob) -> Attempt:
    """The attempt of a job that could not report how it ended."""
    checkpoint = journal.last_written_step()
    return Attempt(
        job_id=job.name,
        time=utc_now(),
        status=KILLED_STATUS,
        recorded=False,
        failures=(),
        signal=0,
        resumed_from=checkpoint,
        checkpoint=checkpoint,
        step=metrics.last_step(journal.paths.metrics_path),
    )


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
