"""A run of the shipped tiny Llama as SageMaker training jobs, for tests: its directory, its requests, how it ended."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyperpod_ft.config.run_file import resolve, validate
from hyperpod_ft.digests import file_sha256, files_below
from hyperpod_ft.launch import submit
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.snapshot import snapshot
from hyperpod_ft.runs.run import Run

if TYPE_CHECKING:
    from tests.aws.conftest import Aws

FSX = "fs-0123456789abcdef0"
MOUNT_NAME = "abcdefgh"
STAGES = {
    "prepare": ("env", "download", "dataset"),
    "train": ("train",),
    "finish": ("consolidate", "merge", "generate"),
}
SECONDS = 240


def values(root: Path, **training: Any) -> dict[str, Any]:
    """The quickstart's run, shorter: two ranks on each of two hosts."""
    return {
        "name": "quick",
        "engine": "torch",
        "cluster": {"root": str(root), "instance_type": "local", "nodes": 2},
        "env": {"python": "current"},
        "model": {"source": "example:tiny-llama"},
        "dataset": {"source": "example:qa", "format": "dolly", "max_length": 256, "loss_on": "completion"},
        "training": {"precision": "fp32", "max_steps": 8, "save_every_steps": 3, "learning_rate": 8e-3, **training},
        "parallelism": {"tensor_parallel": 2, "ranks_per_node": 2},
        "generate": {"max_new_tokens": 4, "train_samples": 2, "validation_samples": 0, "prompts": []},
    }


def make(root: Path, **training: Any) -> Run:
    """The run with its directory, scripts and code, as a submission leaves it."""
    run = Run.of(resolve(validate(values(root, **training), "run.yaml"), root.parent))
    submit.prepare(run, Launchers())
    return run


def request(run: Run, group: str, number: int = 1, **changes: Any) -> dict[str, Any]:
    """CreateTrainingJob's, with the file system as the run's root."""
    hosts = run.config.cluster.nodes if group == "train" else 1
    directory = f"/{MOUNT_NAME}/ft"
    code = snapshot(run.code_copies).relative_to(run.root)
    name = f"{run.config.name}-{run.plan.run_id}-{group}-{number}"
    return {
        "TrainingJobName": name,
        "RoleArn": "arn:aws:iam::123456789012:role/hyperpod-ft",
        "AlgorithmSpecification": {
            "TrainingImage": "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch:2.13-cpu-amzn2023-sagemaker",
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["python3", "/opt/ml/input/data/code/entry.py"],
        },
        "HyperParameters": {
            "job": name,
            "stages": " ".join(STAGES[group]),
            "root": str(run.root),
            "run_directory": str(run.directory),
            "python": str(run.python),
            "max_runtime": "3600",
        },
        "InputDataConfig": [_channel("code", f"{directory}/{code}", "ro"), _channel("fsx", directory, "rw")],
        "OutputDataConfig": {"S3OutputPath": "s3://bucket/output"},
        "ResourceConfig": {"InstanceType": "ml.c7i.4xlarge", "InstanceCount": hosts, "VolumeSizeInGB": 50},
        "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
        "VpcConfig": {"Subnets": ["subnet-0123456789abcdef0"], "SecurityGroupIds": ["sg-0123456789abcdef0"]},
        **changes,
    }


def _channel(name: str, directory: str, mode: str) -> dict[str, Any]:
    source = {
        "FileSystemId": FSX,
        "FileSystemAccessMode": mode,
        "FileSystemType": "FSxLustre",
        "DirectoryPath": directory,
    }
    return {"ChannelName": name, "DataSource": {"FileSystemDataSource": source}, "InputMode": "File"}


class Jobs:
    """The training jobs of a test's account."""

    def __init__(self, aws: "Aws", file_system: Path) -> None:
        """`file_system`: the local directory that stands for the FSx; its directory `ft` is the runs' root."""
        aws.scenario(file_systems={FSX: str(file_system)})
        self.aws = aws
        self.sagemaker = aws.client("sagemaker")

    def create(self, run: Run, group: str, number: int = 1, **changes: Any) -> str:
        made = request(run, group, number, **changes)
        self.sagemaker.create_training_job(**made)
        return str(made["TrainingJobName"])

    def describe(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.sagemaker.describe_training_job(TrainingJobName=name)
        return found

    def wait(self, name: str, until: Callable[[dict[str, Any]], bool] | None = None) -> dict[str, Any]:
        """Until the job has ended, or `until` says so."""
        deadline = time.monotonic() + SECONDS
        while True:
            found = self.describe(name)
            ended = found["TrainingJobStatus"] in ("Completed", "Failed", "Stopped")
            if ended or (until and until(found)):
                return found
            assert time.monotonic() < deadline, (found["SecondaryStatus"], self.log(name))
            time.sleep(0.05)

    def run(self, run: Run, group: str, number: int = 1, **changes: Any) -> dict[str, Any]:
        return self.wait(self.create(run, group, number, **changes))

    def complete(self, run: Run, groups: Sequence[str] = ("prepare", "train", "finish")) -> None:
        for group in groups:
            ended = self.run(run, group)
            assert ended["TrainingJobStatus"] == "Completed", (
                ended["FailureReason"],
                self.log(ended["TrainingJobName"]),
            )

    def log(self, name: str) -> str:
        """What its containers printed, stream by stream."""
        logs, group = self.aws.client("logs"), "/aws/sagemaker/TrainingJobs"
        text = ""
        for stream in logs.describe_log_streams(logGroupName=group, logStreamNamePrefix=f"{name}/")["logStreams"]:
            events = logs.get_log_events(
                logGroupName=group, logStreamName=stream["logStreamName"], startFromHead=True, limit=10000
            )["events"]
            text += "\n".join([f"== {stream['logStreamName']}", *(event["message"] for event in events)]) + "\n"
        return text


def losses(run: Run) -> dict[int, float]:
    """By step; a step that was trained twice has the last one."""
    rows = (json.loads(line) for line in run.metrics_path.read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows}


def results(run: Run) -> dict[str, Any]:
    """What must be the same however a run was started: every byte of adapter and model, losses, answers."""
    files = [*files_below(run.adapter), *files_below(run.tuned_model)]
    samples = json.loads(run.samples_path.read_text())
    return {
        "files": {str(file.relative_to(run.directory)): file_sha256(file) for file in files},
        "losses": losses(run),
        "samples": samples["samples"],
    }
