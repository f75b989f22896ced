"""Launcher `sagemaker`: a run as SageMaker training jobs, one for each group of stages, and their logs."""

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hyperpod_ft import publish
from hyperpod_ft.aws import log_streams
from hyperpod_ft.aws.checks import images
from hyperpod_ft.aws.checks.account import looked_at
from hyperpod_ft.aws.checks.service_model import check_request
from hyperpod_ft.aws.log_streams import LogStream, line_of
from hyperpod_ft.aws.session import Session, explained
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.findings import refuse_errors
from hyperpod_ft.launch.interface import After, JobPreview, JobState, Launcher
from hyperpod_ft.launch.snapshot import snapshot
from hyperpod_ft.planning.plan import StagePlan
from hyperpod_ft.runs.job_files import BANNER
from hyperpod_ft.runs.jobs import CODE_COPY, Job
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker import advance as advancing
from hyperpod_ft.sagemaker.groups import NO_MAIL, groups, job_name, name_prefix, next_number, training_jobs
from hyperpod_ft.sagemaker.section import SAGEMAKER, sagemaker_section, store_of, store_url
from hyperpod_ft.sagemaker.store.sync import RunSync, pull_models, sync_of
from hyperpod_ft.sagemaker.training_jobs import TrainingJobs
from hyperpod_ft.sagemaker.training_request import IMAGE, create_training_job, job_images, previews

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
_FIRST_HOST = "algo-1"
_STREAM = re.compile(r".*/(algo-\d+)-[^/]*")


class JobLogs:
    """The output of a training job's containers, from CloudWatch to a file for each stage, as it grows.

    Each container has a stream `<job>/algo-<n>-<time>`, and a further one after each restart. The first host's lines
    say which stage has begun; lines of other hosts are marked with the host. `update` adds what is new since the last
    call; the first call reads all.
    """

    def __init__(self, run: Run, name: str, stages: Sequence[str], session: Session) -> None:
        self._run, self._name, self._stages = run, name, tuple(stages)
        self._session = session
        self._streams: dict[str, LogStream] = {}  # by name
        self._stage = self._stages[0]
        self._begun: set[str] = set()

    def update(self) -> None:
        """Raises UserError when CloudWatch cannot be read. A job without streams has no logs yet."""
        with explained(f"log of training job {self._name}"):
            events = list(self._new_events(self._session.client("logs")))
        # stable: lines of one stream keep their order
        events.sort(key=lambda event: event[0])
        lines: dict[str, list[str]] = {}
        for _, host, message in events:
            begins = BANNER.match(message)
            if host == _FIRST_HOST and begins and begins[1] in self._stages:
                self._stage = begins[1]
            mark = "" if host == _FIRST_HOST else f"{host}: "
            lines.setdefault(self._stage, []).append(f"{mark}{message}\n")
        for stage, added in lines.items():
            path = self._run.paths.fetched_log(stage, self._name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a" if stage in self._begun else "w", encoding="utf-8") as file:
                file.writelines(added)
            self._begun.add(stage)

    def _new_events(self, client: Any) -> Iterator[tuple[int, str, str]]:
        """Timestamp, host and line of what was not read yet, stream by stream."""
        streams = log_streams.newest_first(client, LOG_GROUP, f"{self._name}/")
        for found in sorted(streams, key=lambda stream: stream.name):
            stream = self._streams.setdefault(found.name, found)
            named = _STREAM.fullmatch(stream.name)
            host = named[1] if named else _FIRST_HOST
            yield from ((event["timestamp"], host, line_of(event)) for event in stream.new_events())


@dataclass(frozen=True)
class SageMakerLauncher(Launcher):
    """SageMaker in the region of each run's section `sagemaker`."""

    name: ClassVar[str] = SAGEMAKER
    shares_volume: ClassVar[bool] = False
    groups_stages: ClassVar[bool] = True
    _regions: dict[str, TrainingJobs] = field(default_factory=dict, init=False, repr=False, compare=False)
    _logs: dict[str, JobLogs] = field(default_factory=dict, init=False, repr=False, compare=False)

    def check(self, run: Run, stages: Sequence[StagePlan]) -> None:
        """Raises UserError for an image that does not exist; one that could not be looked at is a warning."""
        region, session = sagemaker_section(run.config).region, self._jobs(run.config).session
        uris = job_images(run, stages)
        found = looked_at(IMAGE, "the images", lambda: images.missing(session.client("ecr"), region, uris, IMAGE))
        refuse_errors(found, lambda line: print(line, file=sys.stderr))

    def submit(self, run: Run, stages: Sequence[StagePlan], after: After) -> None:
        """Record a training job for each group of the stages, and create the first one.

        Raises UserError, before anything is recorded, for what SageMaker's own model of a request refuses.
        """
        jobs, sync = self._jobs(run.config), self._sync(run)
        code = snapshot(run.paths.code_copies).name
        existing = jobs.names(name_prefix(run))
        now, recorded = utc_now(), []
        for group in groups(stages):
            name = job_name(run, group.name, next_number(run, group.name, existing))
            _check(create_training_job(run, group, name, code))
            recorded += [Job(stage.name, name, self.name, now, code=code) for stage in group.stages]
        sync.discard([stage.name for stage in stages])
        sync.prepare()
        try:
            # where others look for them, at once: a look at the run replaces the jobs here by those
            for job in recorded:
                run.journal.add_job(job)
            sync.push([run.paths.jobs_path])
            advancing.advance(run, jobs, sync)
        except BaseException:
            # SageMaker may have accepted a job, whose container would create the next one
            with contextlib.suppress(UserError):
                self._stop(run, recorded)
            raise
        if run.config.cluster.mail_user:
            print(f"warning: cluster.mail_user: {NO_MAIL}; `sagemaker setup --mail` has AWS do it", file=sys.stderr)
        if (section := sagemaker_section(run.config)).remote_debug:
            target = next((job for job in recorded if job.stage == "train"), recorded[-1]).job_id
            command = f"aws ssm start-session --region {section.region} --target"
            print(f"A shell in the first host of {target}: {command} sagemaker-training-job:{target}_{_FIRST_HOST}")

    def states(self, run: Run, jobs: Sequence[Job]) -> Mapping[Job, JobState]:
        """The run's jobs, also those that another machine submitted and those that are not recorded.

        Nothing is brought to the directory of another user, who could have made its parts links to this user's files.
        """
        sagemaker, sync = self._jobs(run.config), self._sync(run) if run.journal.is_own else RunSync()
        sync.refresh()
        known = advancing.states(run, sagemaker)
        if not all(state.active for state in known.values()):
            # records, or a job that continues this one, may have come between that look and the end of the job
            sync.refresh()
            known = advancing.states(run, sagemaker)
        states = {job: known[job.job_id] for job in training_jobs(run) if job.job_id in known}
        recorded = {job.job_id for job in training_jobs(run)}
        now = utc_now()
        for name in sagemaker.names(name_prefix(run)):
            if name not in recorded and (found := sagemaker.find(name)) is not None:
                stages, code = (found.hyperparameters.get(key, "") for key in ("stages", "code"))
                code = code if re.fullmatch(CODE_COPY, code) else ""
                jobs_of = [Job(stage, name, self.name, now, code=code) for stage in stages.split() if stage in run.plan]
                states |= dict.fromkeys(jobs_of, found.state)
        return states

    def advance(self, run: Run) -> str:
        """Creates nothing while a submission is at work, which may not have pushed yet what its jobs need."""
        with contextlib.ExitStack() as alone:
            try:
                alone.enter_context(publish.lock(run.paths.submit_lock, patience=0))
            except UserError:
                return ""
            return advancing.advance(run, self._jobs(run.config), self._sync(run)) or ""

    def cancel(self, run: Run, jobs: Sequence[Job]) -> None:
        """Mark the jobs first, so that no container creates the one after it, then stop those that exist.

        Also those that a container has just created: it may have looked for marks before. Raises UserError when it
        cannot be seen whether there are any, and for a directory of another user: with a copy of this user's run.yaml
        it names this user's jobs.
        """
        if not run.journal.is_own:
            raise UserError(
                f"{run.paths.directory}: belongs to another user",
                "only that user can cancel its training jobs with this command",
            )
        self._stop(run, jobs)
        names = {job.job_id for job in jobs}
        try:
            known = self.states(run, jobs)
            created = [job for job, state in known.items() if state.active and job.job_id not in names]
        except UserError as error:
            problem = f"cancelled, but a container may have created another training job: {error.problem}"
            again = f"run hyperpod-ft cancel {run.paths.directory} again"
            raise UserError(problem, f"{error.remedy}; then {again}" if error.remedy else again) from error
        if created:
            self._stop(run, created)

    def _stop(self, run: Run, jobs: Sequence[Job]) -> None:
        markers = [run.paths.cancel_marker(job.stage, job.job_id) for job in jobs]
        for marker in markers:
            publish.write_text(marker, "")
        self._sync(run).push(markers)
        sagemaker = self._jobs(run.config)
        for name in dict.fromkeys(job.job_id for job in jobs):
            found = sagemaker.find(name)
            if found is not None and found.state.active:
                sagemaker.stop(name)

    def log(self, run: Run, job: Job) -> Path | None:
        """What the container has written where this machine sees it, or else what CloudWatch has of it by now."""
        stages = [known.stage for known in training_jobs(run) if known.job_id == job.job_id and run.journal.is_own]
        if stages and not run.paths.log(job.stage, job.job_id).exists():  # and the job is this run's
            if job.job_id not in self._logs:
                self._logs[job.job_id] = JobLogs(run, job.job_id, stages, self._jobs(run.config).session)
            self._logs[job.job_id].update()
        return run.journal.log_here(job.stage, job.job_id)

    def previews(self, run: Run, stages: Sequence[StagePlan]) -> Sequence[JobPreview]:
        return [*previews(run, stages)] if run.config.sagemaker else []

    def location(self, run: Run, path: Path) -> str:
        return store_url(run, path) if store_of(run.config) and not path.exists() else str(path)

    def bring_outputs(self, run: Run, directories: Sequence[Path]) -> None:
        pull_models(run, directories)

    def _jobs(self, config: RunConfig) -> TrainingJobs:
        region = sagemaker_section(config).region
        return self._regions.setdefault(region, TrainingJobs(region))

    def _sync(self, run: Run) -> RunSync:
        return sync_of(run, self._jobs(run.config).session)


def _check(request: dict[str, object]) -> None:
    """Raise UserError for the first violation of SageMaker's model of the request."""
    for violation in check_request("sagemaker", "CreateTrainingJob", request):
        raise UserError(
            f"training job {request['TrainingJobName']}: {violation.path} {violation.problem}",
            "correct the run file's sections cluster and sagemaker",
        )
