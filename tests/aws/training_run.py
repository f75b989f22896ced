"""A run of the shipped tiny Llama as SageMaker training jobs, for tests: its submission, its jobs, how it ended."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyperpod_ft.config.run_file import resolve, validate
from hyperpod_ft.digests import file_sha256, files_below
from hyperpod_ft.launch import submit
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import Selection
from hyperpod_ft.sagemaker.cli.setup import STACK
from hyperpod_ft.sagemaker.resources import deploy
from hyperpod_ft.sagemaker.section import store_of
from hyperpod_ft.sagemaker.store.run_store import RunStore
from tests.aws.conftest import kit_session
from tests.waiting import wait_for

if TYPE_CHECKING:
    from tests.aws.conftest import Aws

FSX = "fs-0123456789abcdef0"
MOUNT_NAME = "abcdefgh"
SECONDS = 900
_FILE_SYSTEM = {
    "id": FSX,
    "directory": f"/{MOUNT_NAME}/ft",
    "subnets": ["subnet-0123456789abcdef0"],
    "security_groups": ["sg-0123456789abcdef0"],
}


def values(root: Path, section: dict[str, Any], nodes: int = 2, **changes: Any) -> dict[str, Any]:
    """A run file like the quickstart's, shorter: a rank on each of two hosts. `section`: `sagemaker`.

    `changes`: of section training.
    """
    return {
        "name": "quick",
        "engine": "torch",
        "cluster": {
            "root": str(root),
            "instance_type": "c7i.4xlarge",
            "nodes": nodes,
            "max_restarts": 5,
            "cpus_per_cpu_stage": 2,
        },
        **({"sagemaker": section} if section else {}),
        "env": {"python": "current"},
        "model": {"source": "example:tiny-llama"},
        "dataset": {"source": "example:qa", "format": "dolly", "max_length": 256, "loss_on": "completion"},
        "training": {"precision": "fp32", "max_steps": 8, "save_every_steps": 3, "learning_rate": 8e-3, **changes},
        "parallelism": {"ranks_per_node": 1},
        "generate": {"max_new_tokens": 4, "train_samples": 2, "validation_samples": 0, "prompts": []},
    }


def fully_sharded(values: dict[str, Any]) -> dict[str, Any]:
    """The same run, training all parameters, each sharded over both hosts."""
    return values | {
        "parallelism": {**values["parallelism"], "sharding": "zero3", "shard_ranks": 2},
        "training": {**values["training"], "method": "full"},
    }


def make(root: Path, values: dict[str, Any]) -> Run:
    """Submit a run."""
    root.mkdir(parents=True, exist_ok=True)
    run = Run.of(resolve(validate(values, "run.yaml"), root))
    submit.submit(run, Launchers(), Selection(), "sagemaker")
    return run


def copy_shared(root: Path, other: Path) -> None:
    """Give a root the model, dataset and certificate of another."""
    for name in ("models", "datasets", "records"):
        shutil.copytree(other / name, root / name)


class Jobs:
    """The training jobs of a test's account, with the role and the bucket of `hyperpod-ft sagemaker setup`."""

    def __init__(self, aws: "Aws", file_system: Path | None = None) -> None:
        """`file_system`: the local directory that stands for the FSx, whose directory `ft` is the runs' root; without
        one, the runs are in a store. `section`: `sagemaker` of a run file.
        """
        made = deploy(kit_session(), lambda _: None, name=STACK, file_system=file_system is not None)
        self.role, self.bucket, place = made.role_arn, made.bucket, f"s3://{made.bucket}/ft"
        self.section: dict[str, Any] = {"region": made.region, "role": made.role_arn, "spot": True}
        if file_system:
            aws.scenario(file_systems={FSX: str(file_system)})
            self.section |= {"file_system": _FILE_SYSTEM, "output": place}
        else:
            self.section["store"] = place
        self.aws = aws
        self.sagemaker = aws.client("sagemaker")

    def deny(self, action: str) -> None:
        """Take a permission away from the role."""
        denied = {"Version": "2012-10-17", "Statement": [{"Effect": "Deny", "Action": action, "Resource": "*"}]}
        name, document = self.role.rpartition("/")[2], json.dumps(denied)
        self.aws.client("iam").put_role_policy(RoleName=name, PolicyName="denied", PolicyDocument=document)

    def describe(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.sagemaker.describe_training_job(TrainingJobName=name)
        return found

    def wait(self, name: str, until: Callable[[dict[str, Any]], bool] | None = None) -> dict[str, Any]:
        """Until the job has ended, or `until` says so."""

        def reached() -> dict[str, Any] | None:
            found = self.describe(name)
            ended = found["TrainingJobStatus"] in ("Completed", "Failed", "Stopped")
            return found if ended or (until and until(found)) else None

        return wait_for(reached, SECONDS, lambda: (self.describe(name)["SecondaryStatus"], self.log(name)), every=0.5)

    def names(self, run: Run) -> list[str]:
        """Of the jobs that exist, in the order of their creation."""
        pages = self.sagemaker.get_paginator("list_training_jobs").paginate(NameContains="-", SortOrder="Ascending")
        return [found["TrainingJobName"] for page in pages for found in page["TrainingJobSummaries"]]

    def wait_for_the_run(self, run: Run) -> None:
        """Until every stage is done; fails when a job does."""

        def done() -> bool:
            for name in self.names(run):
                found = self.describe(name)
                assert found["TrainingJobStatus"] != "Failed", (found["FailureReason"], self.log(name))
                if found["TrainingJobStatus"] == "InProgress":
                    return False
            Launchers().bring_small_files(run)  # dozens of requests; a run in a store is known here by what they bring
            return all(run.journal.is_done(stage.name) for stage in run.plan.stages)

        wait_for(done, SECONDS, lambda: [self.log(name) for name in self.names(run)], every=1)

    def fetch(self, run: Run) -> None:
        """Bring the results of a run in a store here."""
        if store_of(run.config):
            for stage in run.plan.stages[run.plan.stages.index(run.plan["train"]) + 1 :]:
                RunStore(run, self.aws.client("s3")).pull_stage(stage.name)

    def log(self, name: str) -> str:
        return log(self.aws, name)


def log(aws: "Aws", name: str) -> str:
    """What the containers of a training job printed, stream by stream."""
    logs, group = aws.client("logs"), "/aws/sagemaker/TrainingJobs"
    text = ""
    streams = []
    with suppress(logs.exceptions.ResourceNotFoundException):  # before the first line of the first job
        streams = logs.describe_log_streams(logGroupName=group, logStreamNamePrefix=f"{name}/")["logStreams"]
    for stream in streams:
        events = logs.get_log_events(
            logGroupName=group, logStreamName=stream["logStreamName"], startFromHead=True, limit=10000
        )["events"]
        text += "\n".join([f"== {stream['logStreamName']}", *(event["message"] for event in events)]) + "\n"
    return text


def losses(run: Run) -> dict[int, float]:
    """By step; a step that was trained twice has the last one."""
    rows = (json.loads(line) for line in run.paths.metrics_path.read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows}


def resumed_from(run: Run) -> list[int]:
    """The steps that its training resumed from."""
    record = run.journal.record("train")
    assert record is not None
    found: list[int] = record.facts["resumed_from"]
    return found


def results(run: Run) -> dict[str, Any]:
    """What must be the same however a run was started: every byte of adapter and model, losses, answers.

    Except the model's card, which names the run.
    """
    files = [
        file
        for file in (*files_below(run.paths.adapter), *files_below(run.paths.tuned_model))
        if file.name != "README.md"
    ]
    samples = json.loads(run.paths.samples_path.read_text())
    return {
        "files": {str(file.relative_to(run.paths.directory)): file_sha256(file) for file in files},
        "losses": losses(run),
        "samples": samples["samples"],
    }
