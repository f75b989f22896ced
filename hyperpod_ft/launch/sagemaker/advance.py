"""Which training job of a run comes next, and creating it.

Training jobs know no dependencies. A submission records all its jobs at once, under the names they will have; `advance`
creates the first one whose stages have no records yet. It reads everything anew and is idempotent: `submit --watch`,
`status`, `resume` and the last act of a container call it, also at the same time, because SageMaker refuses a second
job of a name.
"""

from dataclasses import replace

from hyperpod_ft.launch.protocol import JobState
from hyperpod_ft.launch.sagemaker.groups import LAUNCHER, Group, Planned, job_name, planned
from hyperpod_ft.launch.sagemaker.place import Place
from hyperpod_ft.launch.sagemaker.training_jobs import TrainingJob, TrainingJobs
from hyperpod_ft.launch.sagemaker.training_request import create_training_job
from hyperpod_ft.runs import metrics, restarts
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.runs.restarts import Attempt
from hyperpod_ft.runs.run import Run

_LOST_STATUS = 137  # of a job that was killed: 128 + SIGKILL
_TERMINATED = "143"  # of a script that SIGTERM ended: what SageMaker sends at the job's limit
_INTERNAL_ERROR = "InternalServerError"  # how the reason of an error of SageMaker's own begins


def advance(run: Run, jobs: TrainingJobs, place: Place, leaving: str = "") -> str | None:
    """Create the training job whose turn it is; returns its name, None if there is nothing to create.

    `leaving`: the job that this program is the last act of, which SageMaker still lists as running. Raises UserError
    when SageMaker refuses, for example because of a quota.
    """
    place.refresh()
    for job in planned(run.jobs()):
        left = _left(run, job)
        if not left:
            continue
        if _is_cancelled(run, job):
            return None
        found = jobs.find(job.name)
        if found is None:
            return _create(run, jobs, job, left)
        if found.state.active and job.name != leaving:
            return None
        if not _is_continued(run, job, found, left):
            return None
        follower = replace(job, name=job_name(run, job.group, job.number + 1), number=job.number + 1)
        for stage in left:
            run.add_job(Job(stage, follower.name, LAUNCHER, job.submitted, code=job.code))
        place.publish([run.jobs_path, *(path for stage in left if (path := run.restarts_path(stage)).exists())])
        return _create(run, jobs, follower, left)
    return None


def states(run: Run, jobs: TrainingJobs) -> dict[str, JobState]:
    """The states of the newest submission's training jobs, by name, of those that have stages left."""
    found: dict[str, JobState] = {}
    awaited = ended = ""
    for job in planned(run.jobs()):
        if not _left(run, job):
            continue
        known = jobs.find(job.name)
        if known is not None:
            state = known.state
        elif _is_cancelled(run, job):
            state = JobState("CANCELLED")
        elif ended:
            state = JobState("CANCELLED", f"{ended} has not done its stages")
        else:
            state = JobState("PENDING", f"after {awaited}" if awaited else "not created yet")
        found[job.name] = state
        if state.active:
            awaited = job.name
        else:
            ended = job.name
    return found


def _left(run: Run, job: Planned) -> list[str]:
    return [stage for stage in job.stages if stage in run.plan and not run.is_done(stage)]


def _is_cancelled(run: Run, job: Planned) -> bool:
    return any(run.cancel_marker(stage, job.name).exists() for stage in job.stages)


def _create(run: Run, jobs: TrainingJobs, job: Planned, stages: list[str]) -> str | None:
    group = Group(job.group, tuple(run.plan[stage] for stage in stages))
    request = create_training_job(run, group, job.name, job.code)
    return job.name if jobs.create(request) else None


def _is_continued(run: Run, job: Planned, found: TrainingJob, left: list[str]) -> bool:
    """Whether another job continues one that has ended without the records of these stages.

    Yes for one that says so: it saved a checkpoint and left before its time limit. Yes, a few times, for one that lost
    its instances or was killed: no container could say anything. No for a stage that failed (`attempts.decide` in the
    container has judged), and for a job that was stopped, or that never got instances.
    """
    stage = next((stage for stage in left if run.plan[stage].starts_ranks), None)
    if stage is None:
        return False
    history = restarts.history(run, stage)
    of_job = [attempt for attempt in history if attempt.job_id == job.name]
    if of_job and of_job[-1].cause == "time limit":
        return True
    if found.state.state in ("CANCELLED", "DEADLINE") or not found.began or _has_failed(run, job, found, left):
        return False
    of_submission = {known.job_id for known in run.jobs() if known.submitted == job.submitted}
    lost = [known for known in history if known.job_id in of_submission and known.status == _LOST_STATUS]
    if len(lost) >= run.config.cluster.max_restarts:
        return False
    checkpoint = max(run.checkpoints_by_step(), default=0)
    row = metrics.last_row(run.metrics_path)
    step = int(row["step"]) if row else 0
    restarts.add(run, stage, Attempt(job.name, utc_now(), _LOST_STATUS, False, (), 0, checkpoint, checkpoint, step))
    return True


def _has_failed(run: Run, job: Planned, found: TrainingJob, left: list[str]) -> bool:
    """Whether a stage of the job has left an exit status of its own, and not because SageMaker ended the job."""
    ended = found.state.state == "TIMEOUT" or found.state.reason.startswith(_INTERNAL_ERROR)
    for stage in left:
        marker = run.exit_marker(stage, job.name)
        status = marker.read_text(encoding="utf-8").strip() if marker.exists() else "0"
        if status != "0" and not (ended and status == _TERMINATED):
            return True
    return False
