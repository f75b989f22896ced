"""`hyperpod-ft first-day` on the stand-in for AWS, with CPUs where its steps have accelerators."""

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.aws.session import Session, explained, observed
from hyperpod_ft.cluster import access as cluster_access
from hyperpod_ft.cluster.hyperpod.api import Node, list_nodes
from hyperpod_ft.doctor.head_node import shareable
from hyperpod_ft.errors import UserError
from hyperpod_ft.first_day import day, plan, steps
from hyperpod_ft.first_day.plan import STEPS, DayStep
from hyperpod_ft.first_day.recorder import Recorder
from hyperpod_ft.first_day.steps import delete_cluster
from hyperpod_ft.launch import submit
from tests.aws import ssh_nodes
from tests.aws.account_place import Place, cluster_request, put_image
from tests.aws.conftest import Aws
from tests.aws.kit import Kit
from tests.aws.ssh_nodes import USER, Nodes, install_cli, new_key
from tests.aws.world import ACCOUNT
from tests.programs import write_program
from tests.waiting import wait_for

pytestmark = pytest.mark.timeout(1200)
nodes = ssh_nodes.nodes  # a fixture

IMAGE = f"{ACCOUNT}.dkr.ecr.{plan.REGION}.amazonaws.com/own:1"
ON_CPUS = ("engine=torch", "training.precision=fp32", "parallelism.ranks_per_node=1", "parallelism.tensor_parallel=1")
OWN_IMAGE = (f"sagemaker.image={IMAGE}",)
SMALL = ("cluster.nodes=1", "training.max_steps=2", "training.save_every_steps=2", "generate.validation_samples=2")
BROKEN = {"lifecycle": {"worker": {"lines": ["no such device"], "exit": 1}}}
DAY = "first-day-0123abcd"
WITHIN = steps.within


def small(step: DayStep) -> DayStep:
    """The step, with fewer training steps, and on CPUs: then all trainings are one run, which the first one does."""
    if step.kind != "training":
        return step
    return replace(step, instance_type=plan.CPUS, settings=(*step.settings, *ON_CPUS, *SMALL, *OWN_IMAGE))


def left(aws: Aws) -> dict[str, list[str]]:
    """What AWS still bills, by kind."""
    sagemaker, active = aws.client("sagemaker"), ("InProgress", "Stopping")
    jobs = [one for state in active for one in sagemaker.list_training_jobs(StatusEquals=state)["TrainingJobSummaries"]]
    found = {
        "stacks": [one["StackName"] for one in aws.client("cloudformation").describe_stacks()["Stacks"]],
        "buckets": [one["Name"] for one in aws.client("s3").list_buckets()["Buckets"]],
        "endpoints": [one["EndpointName"] for one in sagemaker.list_endpoints()["Endpoints"]],
        "models": [one["ModelName"] for one in sagemaker.list_models()["Models"]],
        "clusters": [one["ClusterName"] for one in sagemaker.list_clusters()["ClusterSummaries"]],
        "file systems": [one["FileSystemId"] for one in aws.client("fsx").describe_file_systems()["FileSystems"]],
        "jobs": [one["TrainingJobName"] for one in jobs],
    }
    return {kind: names for kind, names in found.items() if names}


@contextmanager
def until_a_job_runs(aws: Aws) -> Iterator[None]:
    """A step's time limit that comes when AWS has a training job, however long this machine takes until then."""
    over = threading.Event()

    def end() -> None:
        while not over.wait(0.1):
            if "jobs" in left(aws):
                os.kill(os.getpid(), signal.SIGALRM)
                return

    with WITHIN(30):
        waiting = threading.Thread(target=end)
        waiting.start()
        try:
            yield
        finally:
            over.set()
            waiting.join()


def add_nodes(aws: Aws, nodes: Nodes) -> None:
    """Once the cluster has nodes, let them be logged in to, and let Slurm be there."""
    client = aws.client("sagemaker")

    def there() -> list[Node]:
        with suppress(client.exceptions.ResourceNotFound):
            return list_nodes(client, DAY)
        return []

    write_program(nodes.directory / "slurm" / "srun", f'echo "$*" >{nodes.directory}/job')
    for node in wait_for(there, 900, every=0.2):
        nodes.add(node.instance_id)
        with (nodes.directory / node.instance_id / "sshd_config").open("a") as config:
            config.write(f"SetEnv PATH={nodes.directory}/slurm:/usr/bin:/bin\n")


@pytest.mark.training
def test_every_step(aws: Aws, nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_image(aws, IMAGE)
    monkeypatch.setenv("HYPERPOD_FT_POLL_SECONDS", "5")
    monkeypatch.setattr(cluster_access, "login_user", lambda *_: USER)  # sshd can log in no other without root
    adding = threading.Thread(target=add_nodes, args=(aws, nodes))
    adding.start()
    report = tmp_path / "report.txt"
    done = day.run([small(step) for step in STEPS], tmp_path / DAY, report, print)
    adding.join()
    text = report.read_text()
    assert not done.failed, text
    assert left(aws) == {}
    for step, seen in zip(STEPS, ("trained to", "job ran", "it answered", "trained to", "trained to"), strict=True):
        assert f"\n{step.name}: " in text and seen in next(row for row in done.rows if row.startswith(f"{step.name}: "))
    assert (nodes.directory / "job").read_text() == "--nodes=1 --time=5 hostname\n"
    for operation in ("CreateStack", "CreateTrainingJob", "CreateCluster", "CreateEndpoint", "DeleteCluster"):
        assert f" {operation} -> 200 " in text
    assert "REMAINS: nothing" in text
    assert ACCOUNT not in text and str(nodes.home) not in text


@pytest.mark.parametrize("name", ["gpus", "trainium"])
def test_trainings_with_accelerators_are_submitted_as_they_are(aws: Aws, tmp_path: Path, name: str) -> None:
    """As far as the stand-in can follow: it has no accelerators, and here no capacity."""
    put_image(aws, IMAGE)
    (step,) = (replace(step, settings=(*step.settings, *OWN_IMAGE)) for step in STEPS if step.name == name)
    done = day.run([step], tmp_path / "refused", tmp_path / "report.txt", print)
    quota = f"ml.{step.instance_type} for training job usage"
    assert done.failed and f"quota `{quota}` is 0" in done.rows[0]
    aws.scenario(quotas={quota: 2}, capacity={f"ml.{plan.CPUS}": 0})
    done = day.run([step], tmp_path / "submitted", tmp_path / "report.txt", print)
    assert done.failed and "CapacityError" in done.rows[0]
    assert " CreateTrainingJob -> 200 " in (tmp_path / "report.txt").read_text()
    assert left(aws) == {}


@pytest.mark.training
def test_trainings_that_fail_or_take_too_long_leave_nothing(aws: Aws, tmp_path: Path) -> None:
    put_image(aws, IMAGE)
    (cpu,) = (small(step) for step in STEPS if step.name == "cpu")
    failing = replace(cpu, settings=(*cpu.settings, "env.python=/no/python"))
    done = day.run([failing], tmp_path / "failing", tmp_path / "report.txt", print)
    assert done.failed and "env.python: no /no/python in this image" in done.rows[0]
    assert left(aws) == {}
    aws.scenario(seconds={"training.start": 20.0})
    done = day.run([replace(cpu, minutes=0.25)], tmp_path / "slow", tmp_path / "report.txt", print)
    assert done.failed and "cpu: FAILED: not done after" in done.rows[0]
    assert left(aws) == {}


def test_training_jobs_are_stopped_without_their_store_which_is_kept_for_those_that_are_not(
    aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_image(aws, IMAGE)
    (cpu,) = (small(step) for step in STEPS if step.name == "cpu")
    aws.scenario(seconds={"training.start": 15.0})
    limits: list[float] = []

    def within(minutes: float) -> AbstractContextManager[None]:
        limits.append(minutes)
        return until_a_job_runs(aws)

    monkeypatch.setattr(steps, "within", within)
    with monkeypatch.context() as patched:

        def no_store(*_: object) -> None:
            raise UserError("NoSuchBucket")

        patched.setattr(submit, "cancel", no_store)
        done = day.run([cpu], tmp_path / "one", tmp_path / "report.txt", print)
    assert "not done after" in done.rows[0] and done.remains == [] and left(aws) == {}
    refused = {"service": "sagemaker", "operation": "StopTrainingJob", "code": "No", "times": 99}
    aws.scenario(errors=[refused], seconds={"training.start": 60.0})
    done = day.run([cpu], tmp_path / "two", tmp_path / "report.txt", print)
    first, second = done.remains
    assert f"hyperpod-ft cancel {tmp_path}" in first and "still runs, and cannot be cancelled without it" in second
    assert left(aws).keys() == {"stacks", "buckets", "jobs"}
    assert limits == [cpu.minutes] * 2


def test_a_day_ends_when_something_remains(
    aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also after a step that succeeded. What remains is printed after an unexpected error too."""
    (cluster,) = (step for step in STEPS if step.name == "cluster")

    problem: list[Exception] = [ZeroDivisionError("in use"), UserError("in use")]

    def unable() -> None:
        raise problem.pop()

    def works(account: steps.DayAccount, _: DayStep) -> str:
        with account.created("it", unable, "delete-it"):
            return "worked"

    monkeypatch.setattr(day, "inspect_cluster", works)
    done = day.run([cluster, cluster], tmp_path / "one", tmp_path / "report.txt", print)
    assert len(done.rows) == 1 and done.failed
    with pytest.raises(ZeroDivisionError):
        day.run([cluster], tmp_path / "two", tmp_path / "report.txt", print)
    assert capsys.readouterr().out.count("REMAINS: it, which may cost money (in use): delete-it\n") == 2


def test_deletion_waits_for_a_new_login(aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    account = steps.DayAccount(tmp_path, Session(plan.REGION), said.append)
    used = []

    def delete() -> None:
        with explained("it"):
            used.append(account.session.credentials().access_key)
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-new-login")
            account.session.client("sagemaker").list_clusters()

    aws.scenario(errors=[{"service": "sagemaker", "code": "ExpiredTokenException", "times": 2}])
    with account.created("it", delete, "delete-it"):
        pass
    assert account.remains == [] and used[1:] == ["of-the-new-login"] * 2 != used[:2]
    assert len([line for line in said if "NOT DELETED YET, trying again" in line and "have expired" in line]) == 1


@pytest.fixture
def command(kit: Kit, tmp_path: Path) -> Kit:
    """The command, with what step `cluster` needs on this machine."""
    (tmp_path / ".ssh").mkdir(mode=0o700)
    new_key(tmp_path / ".ssh" / "id_ed25519")
    install_cli(tmp_path / "bin")
    kit.environment["PATH"] = f"{tmp_path / 'bin'}:{kit.environment['PATH']}"
    return kit


def test_a_step_that_fails_deletes_what_it_created_and_ends_the_day(command: Kit, place: Place, tmp_path: Path) -> None:
    """And nothing else: not the user's own cluster `first-day`, whose stack has another name, and its ssh files."""
    own = cluster_request(place, "first-day", "lifecycle", ("own", 1, "ml.c5.xlarge"))
    command.aws.client("sagemaker").create_cluster(**own)
    before = left(command.aws)
    (tmp_path / ".ssh" / "hyperpod-ft" / "first-day").mkdir(parents=True)
    expired = {"service": "cloudformation", "operation": "DeleteStack", "code": "ExpiredToken"}
    command.aws.scenario(**BROKEN, errors=[expired])
    arguments = ("first-day", "cluster", "gpus", "--spend-at-most", "8", "--yes", "--report", "report.txt")
    printed, text = command.run_any(*arguments, status=1), (tmp_path / "report.txt").read_text()
    assert "no such device" in printed and "NOT DELETED YET" in printed
    assert left(command.aws) == before
    assert (tmp_path / ".ssh" / "hyperpod-ft" / "first-day").is_dir()
    for shown in (printed, text):
        assert "\ncluster: FAILED: " in shown and "REMAINS: nothing" in shown and "gpus: " not in shown
    assert "sagemaker CreateCluster -> 200 " in text and '"InstanceType": "ml.c5.xlarge"' in text
    assert "cloudformation DeleteStack -> 200 " in text
    assert ACCOUNT not in text and "<account>" in text


def test_ctrl_c_deletes_what_was_created(command: Kit, tmp_path: Path) -> None:
    command.aws.scenario(seconds={"cluster.create": 600.0})
    started = command.start("first-day", "cluster", "--yes", "--report", "report.txt", group="")
    started.wait_for("requested 1 ml.c5.xlarge")
    started.send_signal(signal.SIGINT)
    started.wait_for("deleting cluster")
    command.aws.scenario(seconds={"cluster.create": 0.0})
    started.finish(130)
    assert left(command.aws) == {}
    assert "cluster: FAILED: interrupted" in (tmp_path / "report.txt").read_text()


def test_what_cannot_be_deleted_is_said_and_no_other_day_begins(command: Kit) -> None:
    command.aws.scenario(**BROKEN, fail_deletions={"AWS::EC2::VPC": "it is in use"})
    printed = command.run_any("first-day", "cluster", "--yes", status=1)
    found = re.search(r"REMAINS: cluster (first-day-[0-9a-f]{8}) with its stack", printed)
    assert found and f": {delete_cluster(found[1])}\n" in printed
    assert list(left(command.aws)) == ["stacks"]
    again = command.run_any("first-day", "cpu", "--yes", status=2)
    assert f"stack hyperpod-{found[1]} exists" in again and delete_cluster(found[1]) in again
    assert list(left(command.aws)) == ["stacks"]


def test_nothing_is_asked_of_aws_before_the_price_is_agreed_to(kit: Kit) -> None:
    assert "$5.34" in kit.run_any("first-day", "gpus", "--spend-at-most", "5", status=2)
    assert "for at most $0.51" in kit.run_any("first-day", "cpu", status=2)
    assert "18.95" in kit.run_any("first-day")
    assert kit.aws.requests() == []
    unwritable = ("--report", "/dev/null/report.txt")
    assert "nothing was created" in kit.run_any("first-day", "cpu", "--yes", *unwritable, status=2)
    assert left(kit.aws) == {}


def test_requests_are_recorded_without_secrets(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "swordfish")
    recorder = Recorder()
    with observed(recorder.observe):
        session = Session(plan.REGION)
        sagemaker, s3 = session.client("sagemaker"), session.client("s3")
    variables = {"API_TOKEN": "fox-12345", "PIP_INDEX_URL": "https://me:hunter2@host/simple", "PLACE": "swordfish"}
    request: dict[str, Any] = {
        "TrainingJobName": "t",
        "RoleArn": f"arn:aws:iam::{ACCOUNT}:role/none",
        "AlgorithmSpecification": {"TrainingImage": IMAGE, "TrainingInputMode": "File"},
        "Environment": variables,
        "OutputDataConfig": {"S3OutputPath": "s3://none"},
        "ResourceConfig": {"InstanceType": "ml.c7i.xlarge", "InstanceCount": 1, "VolumeSizeInGB": 1},
        "StoppingCondition": {"MaxRuntimeInSeconds": 60},
    }
    for _ in range(2):
        with pytest.raises(sagemaker.exceptions.ClientError):
            sagemaker.create_training_job(**request)
        with pytest.raises(s3.exceptions.ClientError):
            s3.put_object(Bucket="none", Key="k", Body=b"secret-body")
    Session(plan.REGION).client("sts").get_caller_identity()  # a client that nobody observes
    training, upload = recorder.lines()
    user = f"User: arn:aws:sts::{ACCOUNT}:assumed-role/AWSReservedSSO_x/jane.doe@corp.com is not authorized"
    text = shareable(f"{training}\n{upload}\n{user}\narn:aws:iam::{ACCOUNT}:user/team/john")
    assert text.endswith(":assumed-role/AWSReservedSSO_x/<user> is not authorized\narn:aws:iam::<account>:user/<user>")
    for hidden in ("fox-12345", "me:hunter2", "swordfish", "secret-body", ACCOUNT):
        assert hidden not in text
    assert "sagemaker CreateTrainingJob -> 400 ValidationException: " in training and ", 2 times until " in training
    parameters = json.loads(training[training.index(" {") :])
    assert parameters["ResourceConfig"]["InstanceType"] == "ml.c7i.xlarge"
    assert "s3 PutObject -> 404 NoSuchBucket: " in upload and not upload.endswith("}")
