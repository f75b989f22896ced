"""What each step does in the account, by the functions behind the kit's commands. What a step creates, it deletes."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from hyperpod_ft.aws.checks.account import ValidationResult
from hyperpod_ft.aws.session import Session, explained
from hyperpod_ft.aws.stacks import describe, reporter
from hyperpod_ft.cli.watch.following import follow_in_lines
from hyperpod_ft.cluster import access as cluster_access
from hyperpod_ft.cluster import create as creation
from hyperpod_ft.cluster import maintenance
from hyperpod_ft.cluster.access import ClusterAccess
from hyperpod_ft.cluster.config import CLUSTER_FILE, ClusterConfig, ClusterReference, stack_name
from hyperpod_ft.cluster.ssh import connect, key, ssm
from hyperpod_ft.config import yaml_file
from hyperpod_ft.download import assets
from hyperpod_ft.errors import UserError
from hyperpod_ft.first_day.plan import CONTROLLER, REGION, DayStep, run_of
from hyperpod_ft.launch import submit
from hyperpod_ft.launch.follow import follow, last_lines, log_file
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.status import RunStatus
from hyperpod_ft.progress import PrintLine, format_minutes, polls
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import Selection
from hyperpod_ft.sagemaker import resources, validation
from hyperpod_ft.sagemaker.endpoint.deployment import bundle_prefix, with_settings
from hyperpod_ft.sagemaker.endpoint.operations import EndpointOperations
from hyperpod_ft.sagemaker.endpoint.remove import remove
from hyperpod_ft.sagemaker.endpoint.waiting import EndpointWatch
from hyperpod_ft.sagemaker.groups import name_prefix, number_of, training_jobs
from hyperpod_ft.sagemaker.resources import TrainingResources
from hyperpod_ft.sagemaker.training_jobs import TrainingJobs

STACK, CLUSTER = "hyperpod-ft-first-day", "first-day"
DELETE_STACK = f"hyperpod-ft sagemaker delete --name {STACK} --delete-data --region {REGION}"
DELETE_CLUSTER = f"hyperpod-ft cluster delete {CLUSTER} --delete-data --region {REGION}"
_POLL_SECONDS, _STOP_SECONDS = 10.0, 600.0


class TimeIsUp(BaseException):  # like KeyboardInterrupt: nothing below may handle it
    """A step has taken longer than it may."""


@dataclass
class DayAccount:
    """Where the steps create what they need. `runs`: of the steps that have trained; `remains`: what could not be
    deleted, with the commands that do."""

    directory: Path
    session: Session
    say: PrintLine
    runs: dict[str, Run] = field(default_factory=dict)
    remains: list[str] = field(default_factory=list)

    @contextmanager
    def created(self, what: str, delete: Callable[[], object], command: str) -> Iterator[None]:
        """Delete what the block creates, however it ends; if that fails or is interrupted, it remains."""
        try:
            yield
        finally:
            self.say(f"deleting {what}")
            try:
                delete()
            except BaseException as problem:
                self.remains.append(f"{what}, which may cost money ({str(problem) or 'interrupted'}): {command}")
                self.say(f"NOT DELETED: {self.remains[-1]}")
                if not isinstance(problem, UserError):
                    raise

    def refuse_leftovers(self) -> None:
        """Raises UserError for resources of an earlier day, or of another person's: they are not this one's to
        delete."""
        for name, command in ((STACK, DELETE_STACK), (stack_name(CLUSTER), DELETE_CLUSTER)):
            with explained(f"stack {name}"):
                if describe(self.session.client("cloudformation"), name):
                    raise UserError(f"stack {name} exists, of another first day", f"let that end, or: {command}")


@contextmanager
def within(minutes: float) -> Iterator[None]:
    """End the block after so many minutes, whatever it waits for, with TimeIsUp. Only in the main thread."""

    def end(_: int, __: FrameType | None) -> None:
        raise TimeIsUp(f"not done after {format_minutes(minutes * 60)}")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, minutes * 60, 5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def store(account: DayAccount) -> Iterator[TrainingResources]:
    """The role and the bucket of all trainings and the endpoint."""
    session, progress = account.session, reporter(STACK, account.say)

    def delete() -> None:
        resources.delete(session, progress, name=STACK, delete_data=True)

    with account.created(f"stack {STACK} with its bucket", delete, DELETE_STACK):
        yield resources.deploy(session, progress, name=STACK)


def train(account: DayAccount, step: DayStep, made: TrainingResources) -> str:
    """Train recipe quickstart on the step's instances. Returns what was seen."""
    run = run_of(step, made, account.directory)
    _refuse_errors(account, validation.validate(run, account.session.client))
    launchers = Launchers()
    stop = f"hyperpod-ft cancel {run.paths.directory}"
    with account.created(f"training jobs of step {step.name}", lambda: _stop(run, launchers), stop):
        with within(step.minutes):
            submit.submit(run, launchers, Selection(), "sagemaker", assets.copy_local_sources)
            ended = follow_in_lines(_first_jobs(run, follow(run, launchers, account.say)))
        if ended.state != "done":
            raise UserError(f"{run.paths.directory} is {ended.state}: {_why(run, launchers, ended)}")
    account.runs[step.name] = run
    summary = ended.training_summary
    return f"trained to loss {summary.final_loss:.3f}" if summary else "trained"


def _first_jobs(run: Run, statuses: Iterator[RunStatus]) -> Iterator[RunStatus]:
    """Raises UserError when a job continues another, whose costs nobody has agreed to."""
    for status in statuses:
        if any(number_of(job.job_id) > 1 for job in training_jobs(run)):
            raise UserError(f"{run.paths.directory}: a training job did not end within its limit")
        yield status


def _why(run: Run, launchers: Launchers, ended: RunStatus) -> str:
    failed = ended.failed
    if failed is None:
        return ended.note
    with suppress(UserError):  # of CloudWatch: AWS's own reason is known without it
        failed = replace(failed, log=log_file(run, launchers, failed))
    return " | ".join((f"stage {failed.stage}: {failed.detail}", *last_lines(failed)))


def _stop(run: Run, launchers: Launchers) -> None:
    """Stop jobs that have not ended, and wait: SageMaker bills one that has done its stages for some seconds more."""
    if not run.journal.jobs():
        return
    submit.cancel(run, launchers)
    jobs = TrainingJobs(REGION)
    for waited in polls(_POLL_SECONDS):
        found = [jobs.find(name) for name in jobs.names(name_prefix(run))]
        if not any(job and job.state.active for job in found):
            return
        if waited > _STOP_SECONDS:
            raise UserError(f"{run.paths.directory}: its training jobs have not stopped")


def serve(account: DayAccount, step: DayStep) -> str:
    """Deploy the model of another step, compare its answers and ask it. Returns what was seen."""
    run = with_settings(account.runs[step.needs], [f"deploy.instance_type={step.instance_type}"])
    operations = EndpointOperations(account.session, account.say)
    planned = operations.preview(run)
    operations.check(planned)
    name = planned.target.name
    watch = EndpointWatch(account.session, name, account.say)

    def delete() -> None:
        with explained(f"endpoint {name}"):
            remove(watch, bundle_prefix(run))

    with account.created(f"endpoint {name}", delete, planned.delete_command), within(step.minutes):
        proof = operations.deploy(planned, keep=False)
        if not proof.holds:
            raise UserError(f"endpoint {name} does not answer like the tuned model: {proof.summary()}")
        prompt = planned.recorded[0].prompt
        answer = "".join(operations.ask(name, prompt, run.config.generate.max_new_tokens, raw=True))
        return f"{proof.summary()}; asked {prompt!r}, it answered {answer!r}"


def inspect_cluster(account: DayAccount, step: DayStep) -> str:
    """Create a cluster with one worker, and run a job on it through ssh. Returns what was seen."""
    ssm.require("ssh", "aws", "session-manager-plugin")
    key.find(None, Path.home() / ".ssh")
    config = _cluster_config(account.session, step)
    access = ClusterAccess(ClusterReference(CLUSTER, REGION, config, CLUSTER), account.session, account.say)

    def delete() -> None:
        maintenance.delete_cluster(access, delete_data=True, timeout=60)

    with account.created(f"cluster {CLUSTER} with its stack", delete, DELETE_CLUSTER), within(step.minutes):
        creation.create(access, config, step.minutes)
        job = ("srun", "--nodes=1", "--time=5", "hostname")
        request = connect.SshRequest(cluster_access.login_user(access, None), command=job)
        status = connect.connect(cluster_access.ssh_route(access, request), request, account.say)
        if status:
            raise UserError(f"cluster {CLUSTER}: `{' '.join(job)}` on the controller ended with status {status}")
        return "a Slurm job ran on the worker, started through `cluster ssh`"


def _cluster_config(session: Session, step: DayStep) -> ClusterConfig:
    values: dict[str, Any] = {
        "name": CLUSTER,
        "region": REGION,
        "availability_zone_id": _zone(session, step.instance_type),
        "controller": {"instance_type": f"ml.{CONTROLLER}", "volume_gb": 100},
        "workers": [{"name": "worker", "instance_type": f"ml.{step.instance_type}", "volume_gb": 100}],
        "fsx": {"throughput": 125},
        "tags": {"project": "hyperpod-ft-first-day"},
    }
    return yaml_file.validate(CLUSTER_FILE, values, "first-day")


def _zone(session: Session, instance_type: str) -> str:
    """The id of a zone that offers the type."""
    with explained("availability zones"):
        found = session.client("ec2").describe_instance_type_offerings(
            LocationType="availability-zone-id", Filters=[{"Name": "instance-type", "Values": [instance_type]}]
        )
    return str(min(offer["Location"] for offer in found["InstanceTypeOfferings"]))


def _refuse_errors(account: DayAccount, found: ValidationResult) -> None:
    for finding in found.findings:
        account.say(str(finding))
    if errors := [finding for finding in found.findings if finding.verdict == "error"]:
        raise UserError(f"{errors[0].name}: {errors[0].found}", errors[0].remedy)
