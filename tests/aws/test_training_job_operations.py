"""The stand-in's training jobs, with lines of bash as programs: what they find, what ends them, what is refused."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

from tests.aws.kit import ROOT
from tests.aws.training_run import BUCKET, FSX, Jobs
from tests.waiting import wait_for

if TYPE_CHECKING:
    from tests.aws.conftest import Aws

# the checkout, if it is there
IMAGE_IN_TMP = {path.parts[2] for path in (Path(sys.prefix), ROOT) if path.parts[1] == "tmp"}

WAITS = "trap 'echo told; exit 0' TERM; echo ready; while :; do sleep 0.05; done"


@pytest.fixture
def jobs(aws: "Aws", tmp_path: Path) -> Jobs:
    (tmp_path / "fsx" / "ft").mkdir(parents=True)
    return Jobs(aws, tmp_path / "fsx")


def create(jobs: Jobs, program: str, hosts: int = 1, **changes: Any) -> str:
    """A job that runs a line of bash on every host."""
    name = changes.pop("name", "job")
    jobs.sagemaker.create_training_job(
        **{
            "TrainingJobName": name,
            "RoleArn": "arn:aws:iam::123456789012:role/hyperpod-ft",
            "AlgorithmSpecification": {
                "TrainingImage": "image",
                "TrainingInputMode": "File",
                "ContainerEntrypoint": ["bash", "-c", program],
            },
            "OutputDataConfig": {"S3OutputPath": f"s3://{BUCKET}/output"},
            "ResourceConfig": {"InstanceType": "ml.c7i.large", "InstanceCount": hosts, "VolumeSizeInGB": 1},
            "StoppingCondition": {"MaxRuntimeInSeconds": 600},
            **changes,
        }
    )
    return str(name)


def run(jobs: Jobs, program: str, hosts: int = 1, **changes: Any) -> dict[str, Any]:
    return jobs.wait(create(jobs, program, hosts, **changes))


def history(described: dict[str, Any]) -> list[str]:
    return [transition["Status"] for transition in described["SecondaryStatusTransitions"]]


def printed(jobs: Jobs, name: str = "job") -> list[str]:
    """Lines of all containers, without the names of streams."""
    return [line for line in jobs.log(name).splitlines() if not line.startswith("== ")]


def until_log_has(jobs: Jobs, text: str, name: str = "job") -> None:
    def there() -> bool:
        try:
            return text in jobs.log(name)
        except ClientError:  # no log group yet
            return False

    wait_for(there, what=lambda: jobs.describe(name))


LOOKS_AROUND = """
cd /opt/ml/input
python3 - <<'END'
import json, os, socket
from pathlib import Path
config = {path.stem: json.loads(path.read_text()) for path in Path("config").iterdir()}
def resolves(name):
    try:
        return socket.gethostbyname(name).startswith("127.")
    except OSError:
        return False
found = {
    "config": config,
    "names": [resolves(host) for host in config["resourceconfig"]["hosts"]],
    "own_name": resolves(socket.gethostname()),
    "pid": os.getppid(),
    "job": os.environ["TRAINING_JOB_NAME"],
    "given": os.environ["GIVEN"],
    "variables": sorted(name for name in os.environ if name.startswith(("SM_", "SLURM", "PYTEST"))),
    "tmp": os.listdir("/tmp"),
    "data": sorted(str(path.relative_to("data")) for path in Path("data").rglob("*") if path.is_file()),
}
print(json.dumps(found))
END
echo here >/opt/ml/model/file && echo writable
mkdir /opt/ml/checkpoints && echo 7 >/opt/ml/checkpoints/step
touch /etc/here /usr/here 2>/dev/null || echo read-only
"""


def test_a_container_finds_what_sagemaker_documents(jobs: Jobs, aws: "Aws", tmp_path: Path) -> None:
    for key, text in {"data/look.sh": LOOKS_AROUND, "data/b/c.json": "{}", "other": ""}.items():
        aws.client("s3").put_object(Bucket=BUCKET, Key=key, Body=text.encode())
    s3 = {"S3DataType": "S3Prefix", "S3Uri": f"s3://{BUCKET}/data/", "S3DataDistributionType": "FullyReplicated"}
    ended = run(
        jobs,
        "exec bash /opt/ml/input/data/rows/look.sh",
        hosts=11,
        HyperParameters={"steps": "3"},
        Environment={"GIVEN": "yes"},
        InputDataConfig=[{"ChannelName": "rows", "DataSource": {"S3DataSource": s3}}],
    )
    assert ended["TrainingJobStatus"] == "Completed", ended
    assert history(ended) == ["Starting", "Downloading", "Training", "Uploading", "Completed"]
    found = [json.loads(line) for line in printed(jobs) if line.startswith("{")]
    hosts = [host["config"]["resourceconfig"]["current_host"] for host in found]
    assert sorted(hosts) == sorted(f"algo-{number}" for number in range(1, 12))
    for host in found:
        resources = host["config"]["resourceconfig"]
        assert resources["hosts"][:3] == ["algo-1", "algo-10", "algo-11"], "sorted as text, as AWS does"
        assert resources["network_interface_name"] == "lo"
        assert host["config"]["hyperparameters"] == {"steps": "3"}
        assert host["config"]["inputdataconfig"]["rows"]["TrainingInputMode"] == "File"
        assert host["names"] == [True] * 11 and not host["own_name"]
        assert (host["pid"], host["job"], host["given"], host["variables"]) == (1, "job", "yes", [])
        assert host["data"] == ["rows/b/c.json", "rows/look.sh"]
        assert set(host["tmp"]) <= IMAGE_IN_TMP
    assert printed(jobs).count("writable") == printed(jobs).count("read-only") == 11
    uploaded = aws.client("s3").list_objects_v2(Bucket=BUCKET, Prefix="output/")["Contents"]
    assert [found["Key"] for found in uploaded] == ["output/job/checkpoints/step", "output/job/output/model/file"]


def test_file_systems_are_mounted_as_asked(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "fsx" / "ft" / "there").write_text("on the file system\n")
    channels = []
    for name, mode in (("fsx", "rw"), ("code", "ro")):
        source = {
            "FileSystemId": FSX,
            "FileSystemAccessMode": mode,
            "FileSystemType": "FSxLustre",
            "DirectoryPath": "/abcdefgh/ft",
        }
        channels.append({"ChannelName": name, "DataSource": {"FileSystemDataSource": source}})
    program = "cd /opt/ml/input/data; cat fsx/there; echo new >fsx/new; cat code/new; touch code/x || echo read-only"
    network = {"Subnets": ["subnet-0123456789abcdef0"], "SecurityGroupIds": ["sg-0123456789abcdef0"]}
    assert run(jobs, program, InputDataConfig=channels, VpcConfig=network)["TrainingJobStatus"] == "Completed"
    assert {"on the file system", "new", "read-only"} <= set(printed(jobs))
    assert (tmp_path / "fsx" / "ft" / "new").read_text() == "new\n"


def test_a_failure_has_its_reason(jobs: Jobs) -> None:
    ended = run(jobs, "echo oops; echo 'no rows in it' >/opt/ml/output/failure; exit 3", hosts=2)
    assert (ended["TrainingJobStatus"], ended["SecondaryStatus"]) == ("Failed", "Failed")
    assert "no rows in it" in ended["FailureReason"] and "exit code: 3" in ended["FailureReason"]
    assert "oops" in printed(jobs)


def test_one_host_that_fails_ends_the_others(jobs: Jobs, aws: "Aws") -> None:
    aws.scenario(seconds={"training.grace": 0.5})  # the other may not be ready for SIGTERM
    program = "grep -q 'current_host.*algo-2\", .*current_i' /opt/ml/input/config/r* && exit 4; " + WAITS
    assert "exit code: 4" in run(jobs, program, hosts=2)["FailureReason"]


def test_a_stop_tells_pid_1_and_waits(jobs: Jobs) -> None:
    name = create(jobs, WAITS, hosts=2)
    until_log_has(jobs, "ready")
    jobs.sagemaker.stop_training_job(TrainingJobName=name)
    ended = jobs.wait(name)
    assert (ended["TrainingJobStatus"], ended["SecondaryStatus"]) == ("Stopped", "Stopped")
    assert "told" in printed(jobs)
    with pytest.raises(ClientError, match="in status Stopped"):
        jobs.sagemaker.stop_training_job(TrainingJobName=name)


def test_who_does_not_end_is_killed(jobs: Jobs, aws: "Aws") -> None:
    aws.scenario(seconds={"training.grace": 0.2})
    name = create(jobs, "trap '' TERM; echo ready; while :; do sleep 0.05; done")
    until_log_has(jobs, "ready")
    jobs.sagemaker.stop_training_job(TrainingJobName=name)
    assert jobs.wait(name)["TrainingJobStatus"] == "Stopped"


def test_a_job_ends_at_its_limit(jobs: Jobs) -> None:
    ended = run(jobs, WAITS, StoppingCondition={"MaxRuntimeInSeconds": 1})
    assert (ended["TrainingJobStatus"], ended["SecondaryStatus"]) == ("Stopped", "MaxRuntimeExceeded")
    assert "told" in printed(jobs)


def test_a_spot_job_starts_again_on_other_instances(jobs: Jobs, aws: "Aws") -> None:
    program = "echo start; [[ ! -e /tmp/mine ]] || echo old disk; touch /tmp/mine; " + WAITS.replace(
        "exit 0", "exit 143"
    )
    name = create(
        jobs,
        program,
        EnableManagedSpotTraining=True,
        StoppingCondition={"MaxRuntimeInSeconds": 600, "MaxWaitTimeInSeconds": 600},
    )
    until_log_has(jobs, "ready")
    aws.scenario(interruptions={name: [("spot", 0)]})
    wait_for(lambda: printed(jobs).count("ready") == 2, what=lambda: jobs.describe(name))
    jobs.sagemaker.stop_training_job(TrainingJobName=name)
    ended = jobs.wait(name)
    told = ["Starting", "Downloading", "Training", "Interrupted", "Starting", "Downloading", "Training"]
    assert history(ended)[:7] == told
    assert printed(jobs).count("told") == 2 and "old disk" not in printed(jobs)


@pytest.mark.parametrize("retries", [0, 1])
def test_internal_errors_are_retried_if_the_job_says_so(jobs: Jobs, aws: "Aws", retries: int) -> None:
    strategy: dict[str, Any] = {"RetryStrategy": {"MaximumRetryAttempts": retries}} if retries else {}
    name = create(jobs, WAITS, **strategy)
    until_log_has(jobs, "ready")
    aws.scenario(interruptions={name: [("internal error", 0)]})
    if retries:
        wait_for(lambda: printed(jobs).count("ready") == 2, what=lambda: jobs.describe(name))
        assert "Restarting" in history(jobs.describe(name))
    else:
        assert jobs.wait(name)["FailureReason"].startswith("InternalServerError")
    assert "told" not in printed(jobs), "the instances are gone without a word"


def test_no_capacity_is_a_failure(jobs: Jobs, aws: "Aws") -> None:
    aws.scenario(capacity={"ml.c7i.large": 1})
    assert run(jobs, "true", hosts=2)["FailureReason"].startswith("CapacityError")


def test_what_sagemaker_refuses_is_refused(jobs: Jobs, aws: "Aws") -> None:
    assert run(jobs, "true")["TrainingJobStatus"] == "Completed"
    missing = {"S3DataType": "S3Prefix", "S3Uri": f"s3://{BUCKET}/none/"}
    system = {
        "FileSystemId": "fs-0123456789abcdef0",
        "FileSystemAccessMode": "rw",
        "FileSystemType": "FSxLustre",
        "DirectoryPath": "/abcdefgh/ft",
    }
    aws.scenario(quotas={"ml.c7i.large for training job usage": 1})
    refused: dict[str, dict[str, Any]] = {
        "ResourceInUse": {},
        "No S3 objects found": {
            "name": "a",
            "InputDataConfig": [{"ChannelName": "a", "DataSource": {"S3DataSource": missing}}],
        },
        "VpcConfig is required": {
            "name": "b",
            "InputDataConfig": [{"ChannelName": "a", "DataSource": {"FileSystemDataSource": system}}],
        },
        "MaxWaitTimeInSeconds": {"name": "c", "EnableManagedSpotTraining": True},
        "ResourceLimitExceeded": {"name": "d", "hosts": 2},
        "regular expression": {"name": "e_f"},
        "less than or equal to 512": {"name": "f", "Environment": {"LONG": "x" * 513}},
        "enum value set": {
            "name": "g",
            "ResourceConfig": {"InstanceType": "ml.none", "InstanceCount": 1, "VolumeSizeInGB": 1},
        },
    }
    for message, request in refused.items():
        with pytest.raises(ClientError, match=message):
            create(jobs, "true", **request)


def test_jobs_are_listed_and_forgotten(jobs: Jobs) -> None:
    for name in ("one-1", "one-2", "two-1"):
        assert run(jobs, "true", name=name)["TrainingJobStatus"] == "Completed"
    pages = jobs.sagemaker.get_paginator("list_training_jobs").paginate(
        NameContains="one", SortBy="Name", SortOrder="Ascending", PaginationConfig={"PageSize": 1}
    )
    assert [found["TrainingJobName"] for page in pages for found in page["TrainingJobSummaries"]] == ["one-1", "one-2"]
    jobs.sagemaker.delete_training_job(TrainingJobName="one-1")
    with pytest.raises(ClientError, match="not found"):
        jobs.describe("one-1")
