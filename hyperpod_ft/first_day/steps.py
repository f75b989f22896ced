"""What each step does in the account, by the functions behind the kit's commands. What a step creates, it deletes."""

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from hyperpod_ft.aws.session import Session, explained, may_pass, paged
from hyperpod_ft.cli.watch.following import follow_in_lines
from hyperpod_ft.cluster import access as cluster_access
from hyperpod_ft.cluster import create as creation
from hyperpod_ft.cluster import maintenance
from hyperpod_ft.cluster.access import ClusterAccess
from hyperpod_ft.cluster.config import CLUSTER_FILE, ClusterConfig, ClusterReference
from hyperpod_ft.cluster.hyperpod.waiting import Awaited
from hyperpod_ft.cluster.ssh import connect, key, ssm
from hyperpod_ft.cluster.validation.validate import validate
from hyperpod_ft.config import yaml_file
from hyperpod_ft.download import assets
from hyperpod_ft.errors import UserError
from hyperpod_ft.findings import refuse_errors
from hyperpod_ft.first_day.plan import CONTROLLER, REGION, DayStep, run_of
from hyperpod_ft.launch import submit
from hyperpod_ft.launch.follow import follow, last_lines, log_file
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.status import RunStatus
from hyperpod_ft.progress import ChangeReporter, PrintLine, format_minutes, pause, polls
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

_STACK_OF_A_DAY = re.compile(r"hyperpod-(ft-)?(first-day-[0-9a-f]{8})")
_POLL_SECONDS, _STOP_SECONDS = 10.0, 600.0


class TimeIsUp(BaseException):  # like KeyboardInterrupt: nothing below may handle it
    """A step has taken longer than it may."""


@dataclass
class DayAccount:
    """Where the steps create what they need. `directory`: all that is created has its name, which nothing else in the
    account has: deletion goes by names. `runs`: of the steps that train; `remains`: what could not be deleted, with the
    commands that do."""

    directory: Path
    session: Session
    say: PrintLine
    runs: dict[str, Run] = field(default_factory=dict)
    remains: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def stack(self) -> str:
        """Of role and bucket; a cluster has one of its own."""
        return f"hyperpod-ft-{self.name}"

    @contextmanager
    def created(self, what: str, delete: Callable[[], object], command: str) -> Iterator[None]:
        """Delete what the block creates, however it ends; if that fails or is interrupted, it remains."""
        try:
            yield
        finally:
            self.say(f"deleting {what}")
            try:
                self._deleted(what, delete)
            except BaseException as problem:
                self.remains.append(f"{what}, which may cost money ({str(problem) or 'interrupted'}): {command}")
                self.say(f"NOT DELETED: {self.remains[-1]}")
                if not isinstance(problem, UserError):
                    raise

    def _deleted(self, what: str, delete: Callable[[], object]) -> None:
        """Keep trying while credentials or the network are missing: what exists keeps costing money."""
        changed = ChangeReporter(self.say)
        for _ in polls(_POLL_SECONDS):
            try:
                delete()
                return
            except UserError as problem:
                if not may_pass(problem):
                    raise
                changed(f"{what}: NOT DELETED YET, trying again (Ctrl-C gives up)", str(problem))
                self.session.renew()

    def refuse_leftovers(self) -> None:
        """Raises UserError for resources of an earlier day, or of another person's: they are not this one's to
        delete."""
        with explained("stacks"):
            client = self.session.client("cloudformation")
            names = [stack["StackName"] for stack in paged(client, "describe_stacks", "Stacks")]
        for found in filter(None, map(_STACK_OF_A_DAY.fullmatch, names)):
            command = delete_stack(found[0]) if found[1] else delete_cluster(found[2])
            raise UserError(f"stack {found[0]} exists, of another first day", f"let that end, or: {command}")


def delete_stack(name: str) -> str:
    """The command that deletes role and bucket."""
    return f"hyperpod-ft sagemaker delete --name {name} --delete-data --region {REGION}"


def delete_cluster(name: str) -> str:
    """The command that deletes a cluster with its stack."""
    return f"hyperpod-ft cluster delete {name} --delete-data --region {REGION}"


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
    session, name = account.session, account.stack

    def delete() -> None:
        if working := [job for run in account.runs.values() for job in _working(run)]:
            raise UserError(f"{working[0]} still runs, and cannot be cancelled without it")
        resources.delete(session, account.say, name=name, delete_data=True)

    with account.created(f"stack {name} with its bucket", delete, delete_stack(name)):
        yield resources.deploy(session, account.say, name=name)


def train(account: DayAccount, step: DayStep, made: TrainingResources) -> str:
    """Train recipe quickstart on the step's instances. Returns what was seen."""
    run = run_of(step, made, account.directory)
    refuse_errors(validation.validate(run, account.session.client).findings, account.say)
    launchers = Launchers()
    stop = f"hyperpod-ft cancel {run.paths.directory}"
    account.runs[step.name] = run
    with account.created(f"training jobs of step {step.name}", lambda: _stop(account, run), stop):
        with within(step.minutes):
            submit.submit(run, launchers, Selection(), "sagemaker", assets.copy_local_sources)
            ended = follow_in_lines(_first_jobs(run, follow(run, launchers, account.say)))
        if ended.state != "done":
            raise UserError(f"{run.paths.directory} is {ended.state}: {_why(run, launchers, ended)}")
    summary = ended.training_summary
    return f"trained to loss {summary.final_loss:.3f}" if summary else "trained"


def _first_jobs(run: Run, statuses: Iterator[RunStatus]) -> Iterator[RunStatus]:
    """Raises UserError when a job continues another: the user has not agreed to its cost."""
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


def _working(run: Run) -> list[str]:
    """The run's training jobs that have not ended."""
    jobs = TrainingJobs(REGION)
    found = [jobs.find(name) for name in jobs.names(name_prefix(run))]
    return [job.name for job in found if job and job.state.active]


def _stop(account: DayAccount, run: Run) -> None:
    """Stop jobs that have not ended, and wait: SageMaker bills one that has done its stages for some seconds more."""
    if not run.journal.jobs():
        return
    try:
        submit.cancel(run, Launchers())
    except UserError as problem:  # of the store: SageMaker stops jobs without it
        account.say(str(problem))
    idle = 0
    for waited in polls(_POLL_SECONDS):
        working = _working(run)
        for name in working:
            TrainingJobs(REGION).stop(name)
        idle = 0 if working else idle + 1
        if idle == 2:  # a request that was interrupted, or a container, may have created one after the first look
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
            pause(_POLL_SECONDS)
            remove(watch, bundle_prefix(run))  # what a request that was interrupted has created meanwhile

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
    name, config = account.name, _cluster_config(account, step)
    access = ClusterAccess(ClusterReference(name, REGION, config, name), account.session, account.say)
    # also where a cluster has this name
    refuse_errors(validate(config, account.session.client).findings, account.say)

    def delete() -> None:
        with access.explained():
            maintenance.delete_cluster(access, delete_data=True, timeout=60)

    created = account.created(f"cluster {name} with its stack", delete, delete_cluster(name))
    with created, within(step.minutes), access.explained():
        access.wait(step.minutes, Awaited(targets=creation.create_missing(access, config)))
        job = ("srun", "--nodes=1", "--time=5", "hostname")
        request = connect.SshRequest(cluster_access.login_user(access, None), command=job)
        status = connect.connect(cluster_access.ssh_route(access, request), request, account.say)
        if status:
            raise UserError(f"cluster {name}: `{' '.join(job)}` on the controller ended with status {status}")
        return "a Slurm job ran on the worker, started through `cluster ssh`"


def _cluster_config(account: DayAccount, step: DayStep) -> ClusterConfig:
    values: dict[str, Any] = {
        "name": account.name,
        "region": REGION,
        "availability_zone_id": _zone(account.session, step.instance_type),
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
