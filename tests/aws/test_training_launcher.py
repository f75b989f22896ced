"""Launcher `sagemaker` by its commands, on training jobs whose containers really run (containers.py)."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from hyperpod_ft.runs.run import Run
from tests.aws import training_run
from tests.aws.kit import ROOT

if TYPE_CHECKING:
    from tests.aws.conftest import Aws

pytestmark = [pytest.mark.training, pytest.mark.timeout(600)]
ROLE = "arn:aws:iam::123456789012:role/hyperpod-ft"


class Command:
    """`hyperpod-ft` in a directory with a run file, against the stand-in for AWS."""

    def __init__(
        self, directory: Path, aws: "Aws", root: Path, sagemaker: dict[str, Any], nodes: int = 2, **training: Any
    ) -> None:
        self.directory, self.aws = directory, aws
        values = training_run.values(root, **training)
        values["cluster"] |= {"instance_type": "c7i.xlarge", "nodes": nodes}
        values["sagemaker"] = {"region": aws.region, "role": ROLE, "cpu_instance_type": "m5.large", **sagemaker}
        (directory / "run.yaml").write_text(yaml.safe_dump(values))
        self.environment = {
            **aws.environment,
            "HOME": str(directory),
            "XDG_STATE_HOME": str(directory / "state"),
            "PYTHONPATH": str(ROOT),
            "HYPERPOD_FT_POLL_SECONDS": "0.2",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "hyperpod_ft", *arguments],
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str, status: int = 0) -> str:
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == status, output
        assert "Traceback" not in output
        return output

    def status(self, status: int = 0) -> Any:
        return json.loads(self.run("status", "--json", status=status))

    @property
    def opened(self) -> Run:
        (path,) = (Path(self.status()["directory"]),)
        return Run.open(path)

    def wait_until_ended(self) -> None:
        """A job that was told to stop has two minutes for it."""
        jobs, deadline = self.aws.client("sagemaker"), time.monotonic() + 130
        while any(
            jobs.list_training_jobs(StatusEquals=status)["TrainingJobSummaries"]
            for status in ("InProgress", "Stopping")
        ):
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def created(self) -> list[str]:
        """The training jobs, by group and number, oldest first."""
        found = self.aws.client("sagemaker").list_training_jobs(SortBy="CreationTime", SortOrder="Ascending")
        return ["-".join(job["TrainingJobName"].split("-")[-2:]) for job in found["TrainingJobSummaries"]]


@pytest.fixture
def on_file_system(aws: "Aws", tmp_path: Path) -> Command:
    aws.scenario(file_systems={training_run.FSX: str(tmp_path / "fsx")})
    section = {
        "file_system": {
            "id": training_run.FSX,
            "directory": f"/{training_run.MOUNT_NAME}/ft",
            "subnets": ["subnet-0123456789abcdef0"],
            "security_groups": ["sg-0123456789abcdef0"],
        }
    }
    return Command(tmp_path, aws, tmp_path / "fsx" / "ft", section)


def test_a_run_on_a_file_system_from_submit_to_the_model(on_file_system: Command) -> None:
    command = on_file_system
    # another launcher on the same file system begins, and would go on
    command.run("submit", "run.yaml", "--launcher", "process", "--only", "download")
    assert "download: done" in command.run("logs", "download", "-f")
    output = command.run("submit", "run.yaml", "--launcher", "sagemaker")
    assert "Submitted quick/" in output
    assert "env + dataset quick-" in output
    assert "still at work" in command.run("submit", "run.yaml", "--launcher", "sagemaker", status=2)
    assert "cancelled train" in command.run("cancel")
    command.wait_until_ended()
    assert "cancelled" in {stage["state"] for stage in command.status()["stages"]}
    output = command.run("resume", "--watch")
    assert "generate     done" in output
    assert command.created() == ["prepare-1", "prepare-2", "train-2", "finish-2"]
    current = command.status()
    assert {stage["state"] for stage in current["stages"]} == {"done"}
    assert "done" in command.run("list")
    assert "step 8/8" in command.run("logs", "train")
    for launcher in ("sagemaker", "process"):
        assert "Nothing to submit" in command.run("submit", "run.yaml", "--launcher", launcher)


@pytest.fixture
def in_store(aws: "Aws", tmp_path: Path) -> Command:
    aws.client("s3").create_bucket(Bucket="store", CreateBucketConfiguration={"LocationConstraint": aws.region})
    return Command(tmp_path, aws, tmp_path / "root", {"store": "s3://store/ft"})


def test_a_run_in_a_store_goes_on_while_nobody_watches(in_store: Command) -> None:
    """Only `submit` runs here until the model is there: each job's container creates the next."""
    command = in_store
    command.run("submit", "run.yaml", "--launcher", "sagemaker")
    following = command.start("logs", "train", "-f")
    text, _ = following.communicate(timeout=300)
    assert following.returncode == 0, text
    assert "step 8/8" in text
    assert "train: done" in text
    assert "generate: done" in command.run("logs", "generate", "-f")
    assert command.created() == ["prepare-1", "train-1", "finish-1"]
    current = command.status()
    assert current["state"] == "done"
    assert current["model"].startswith("s3://store/ft/runs/quick/")
    run = command.opened
    assert not run.tuned_model.exists(), "the model is in the store, not here"
    assert "trained" in command.run("status")
    assert json.loads(command.run("compare", str(run.directory), "--json"))[0]["steps"] == 8
