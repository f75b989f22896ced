"""Launcher `sagemaker`: a run as SageMaker training jobs, one for each group of stages."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hyperpod_ft import publish
from hyperpod_ft.aws.validation.service_model import check_request
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.protocol import NOTHING_ELSE, AwaitedJobs, JobState
from hyperpod_ft.launch.sagemaker import advance as advancing
from hyperpod_ft.launch.sagemaker.groups import groups, job_name, name_prefix, next_number, sagemaker_section
from hyperpod_ft.launch.sagemaker.job_logs import JobLogs
from hyperpod_ft.launch.sagemaker.store.sync import RunSync, sync_of
from hyperpod_ft.launch.sagemaker.training_jobs import TrainingJobs
from hyperpod_ft.launch.sagemaker.training_request import create_training_job
from hyperpod_ft.launch.snapshot import snapshot
from hyperpod_ft.planning.plan import StagePlan
from hyperpod_ft.runs.jobs import SAGEMAKER, Job
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.runs.run import Run


@dataclass(frozen=True)
class SageMakerLauncher:
    """SageMaker in the region of each run's section `sagemaker`."""

    name: ClassVar[str] = SAGEMAKER
    shares_environment: ClassVar[bool] = False
    can_wait_for_other_runs: ClassVar[bool] = False
    _regions: dict[str, TrainingJobs] = field(default_factory=dict, init=False, repr=False, compare=False)
    _logs: dict[str, JobLogs] = field(default_factory=dict, init=False, repr=False, compare=False)

    def submit(
        self,
        run: Run,
        stages: Sequence[StagePlan],
        submitted: Callable[[Job], None],
        awaited: AwaitedJobs = NOTHING_ELSE,
    ) -> None:
        """Record a training job for each group of the stages, and create the first one.

        Raises UserError, before anything is recorded, for what SageMaker's own model of a request refuses.
        """
        jobs, sync = self._jobs(run), self._sync(run)
        code = snapshot(run.code_copies).name
        existing = jobs.names(name_prefix(run))
        now, recorded = utc_now(), []
        for group in groups(stages):
            name = job_name(run, group.name, next_number(run, group.name, existing))
            _check(create_training_job(run, group, name, code))
            recorded += [Job(stage.name, name, self.name, now, code=code) for stage in group.stages]
        sync.discard([stage.name for stage in stages])
        for job in recorded:
            submitted(job)
        try:
            sync.prepare()
            advancing.advance(run, jobs, sync)
        except BaseException:
            # SageMaker may have accepted a job, whose container would create the next one
            with contextlib.suppress(UserError):
                self._stop(run, recorded)
            raise

    def refresh(self, run: Run) -> None:
        self._sync(run).refresh()

    def advance(self, run: Run) -> str:
        return advancing.advance(run, self._jobs(run), self._sync(run)) or ""

    def states(self, run: Run, jobs: Sequence[Job]) -> Mapping[str, JobState]:
        wanted = {job.job_id for job in jobs}
        found = advancing.states(run, self._jobs(run))
        return {name: state for name, state in found.items() if name in wanted}

    def active(self, run: Run, jobs: Sequence[Job]) -> list[Job]:
        """The run's jobs at work, also those that another machine submitted and those that are not recorded."""
        self._sync(run).refresh()
        training_jobs = self._jobs(run)
        recorded = [job for job in run.jobs() if job.launcher == self.name]
        known = advancing.states(run, training_jobs)
        active = [job for job in recorded if job.job_id in known and known[job.job_id].active]
        names = {job.job_id for job in recorded}
        for name in training_jobs.names(name_prefix(run)):
            if name in names or (found := training_jobs.find(name)) is None or not found.state.active:
                continue
            stages = found.hyperparameters.get("stages", "").split()
            active += [Job(stage, name, self.name, utc_now()) for stage in stages if stage in run.plan]
        return active

    def cancel(self, run: Run, jobs: Sequence[Job]) -> None:
        """Mark the jobs first, so that no container creates the one after it, then stop those that exist.

        Also those that a container has just created: it may have looked for marks before. Raises UserError when it
        cannot be seen whether there are any.
        """
        self._stop(run, jobs)
        names = {job.job_id for job in jobs}
        try:
            created = [job for job in self.active(run, jobs) if job.job_id not in names]
        except UserError as error:
            problem = f"cancelled, but a container may have created another training job: {error.problem}"
            again = f"run hyperpod-ft cancel {run.directory} again"
            raise UserError(problem, f"{error.remedy}; then {again}" if error.remedy else again) from error
        if created:
            self._stop(run, created)

    def _stop(self, run: Run, jobs: Sequence[Job]) -> None:
        markers = [run.cancel_marker(job.stage, job.job_id) for job in jobs]
        for marker in markers:
            publish.write_text(marker, "")
        self._sync(run).push(markers)
        training_jobs = self._jobs(run)
        for name in dict.fromkeys(job.job_id for job in jobs):
            found = training_jobs.find(name)
            if found is not None and found.state.active:
                training_jobs.stop(name)

    def fetch_log(self, run: Run, job: Job) -> None:
        if run.log(job.stage, job.job_id).exists():
            return  # the container has written it where this machine sees it
        if job.job_id not in self._logs:
            stages = [known.stage for known in run.jobs() if known.job_id == job.job_id]
            self._logs[job.job_id] = JobLogs(run, job.job_id, stages, self._jobs(run).session)
        self._logs[job.job_id].update()

    def _jobs(self, run: Run) -> TrainingJobs:
        region = sagemaker_section(run).region
        return self._regions.setdefault(region, TrainingJobs(region))

    def _sync(self, run: Run) -> RunSync:
        return sync_of(run, self._jobs(run).session)


def _check(request: dict[str, object]) -> None:
    """Raise UserError for the first violation of SageMaker's model of the request."""
    for violation in check_request("sagemaker", "CreateTrainingJob", request):
        raise UserError(
            f"training job {request['TrainingJobName']}: {violation.path} {violation.problem}",
            "correct the run file's sections cluster and sagemaker",
        )
