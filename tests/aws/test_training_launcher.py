"""Launcher `sagemaker` by its commands, on training jobs whose containers really run (containers.py)."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from hyperpod_ft.processes import all_pids
from hyperpod_ft.runs.container import NOTICE
from hyperpod_ft.runs.run import Run
from tests.aws import training_run
from tests.aws.kit import ROOT

if TYPE_CHECKING:
    from tests.aws.conftest import Aws

pytestmark = [pytest.mark.training, pytest.mark.timeout(600)]


class Command:
    """`hyperpod-ft` in a directory with a run file, against the stand-in for AWS."""

    def __init__(self, directory: Path, aws: "Aws", values: dict[str, Any]) -> None:
        self.directory, self.aws = directory, aws
        values["cluster"]["instance_type"] = "c7i.xlarge"
        values["sagemaker"] |= {"spot": False, "region": aws.region, "cpu_instance_type": "m5.large"}
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

    def jobs(self) -> list[str]:
        """The names of the training jobs, oldest first."""
        found = self.aws.client("sagemaker").list_training_jobs(SortBy="CreationTime", SortOrder="Ascending")
        return [job["TrainingJobName"] for job in found["TrainingJobSummaries"]]

    def created(self) -> list[str]:
        """The training jobs, by group and number, oldest first."""
        return ["-".join(name.split("-")[-2:]) for name in self.jobs()]


@pytest.fixture
def on_file_system(aws: "Aws", tmp_path: Path) -> Command:
    aws.scenario(file_systems={training_run.FSX: str(tmp_path / "fsx")})
    return Command(tmp_path, aws, training_run.values(tmp_path / "fsx" / "ft"))


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


def test_a_container_that_may_not_create_the_next_job_says_so_and_status_does(on_file_system: Command) -> None:
    command = on_file_system
    command.run("submit", "run.yaml", "--launcher", "sagemaker")
    denied = {"service": "sagemaker", "operation": "CreateTrainingJob", "code": "AccessDeniedException"}
    command.aws.scenario(errors=[denied])
    command.wait_until_ended()
    assert command.created() == ["prepare-1"]
    log = training_run.log(command.aws, command.jobs()[0])
    assert "AccessDeniedException" in log
    assert "the next training job was not created; hyperpod-ft status creates it" in log
    described = command.aws.client("sagemaker").describe_training_job(TrainingJobName=command.jobs()[0])
    assert described["TrainingJobStatus"] == "Completed", "its own stages are done"
    command.run("status")
    assert command.created() == ["prepare-1", "train-1"]
    command.run("cancel")
    command.wait_until_ended()


@pytest.fixture
def in_store(aws: "Aws", tmp_path: Path) -> Command:
    bucket = {"LocationConstraint": aws.region}
    aws.client("s3").create_bucket(Bucket=training_run.BUCKET, CreateBucketConfiguration=bucket)
    values = training_run.values(tmp_path / "root", nodes=1, max_steps=400, save_every_steps=1000)
    values["cluster"]["time_limit"] = "1"  # the shortest: a minute, with notice 12 s before
    values["parallelism"] = {"ranks_per_node": 1}
    return Command(tmp_path, aws, values)


def test_a_run_in_a_store_goes_on_while_nobody_watches(in_store: Command, tmp_path: Path) -> None:
    """Only `submit` runs here until the model is there: each job's container creates the next.

    Training lasts longer than its job may: it saves when notice comes, and another job goes on from there.
    """
    command = in_store
    command.run("submit", "run.yaml", "--launcher", "sagemaker")
    following = command.start("logs", "train", "-f")
    freeze_until_notice(command)
    text, _ = following.communicate(timeout=300)
    assert following.returncode == 0, text
    assert "step 400/400" in text
    assert "train: done" in text
    assert "generate: done" in command.run("logs", "generate", "-f")
    created = command.created()
    assert created[:3] + created[-1:] == ["prepare-1", "train-1", "train-2", "finish-1"]
    assert all(name.startswith("train-") for name in created[3:-1]), "a slow machine may need a third"
    current = command.status()
    assert current["state"] == "done"
    assert current["model"].startswith(f"s3://{training_run.BUCKET}/ft/runs/quick/")
    run = command.opened
    assert not run.tuned_model.exists(), "the model is in the store, not here"
    assert "trained" in command.run("status")
    assert json.loads(command.run("compare", str(run.directory), "--json"))[0]["steps"] == 400
    first, second = (training_run.log(command.aws, job) for job in command.jobs()[1:3])
    saved = re.search(r"close to the time limit; the next job resumes from step (\d+)", first)
    assert saved, first
    assert f"train: resuming from step {saved[1]}\n" in second


def freeze_until_notice(command: Command) -> None:
    """Suspend the rank that trains until it has been told that the time limit is close."""
    wait_for(
        lambda: "train-1" in command.created() and "\nstep 1/400" in training_run.log(command.aws, command.jobs()[1])
    )
    (rank,) = (pid for pid in all_pids() if is_rank(pid, str(command.directory)))
    os.kill(rank, signal.SIGSTOP)
    pending = re.compile(r"^ShdPnd:\t(\w+)$", re.MULTILINE)

    def is_told() -> bool:
        found = pending.search(Path(f"/proc/{rank}/status").read_text())
        return found is not None and bool(int(found[1], 16) & 1 << NOTICE - 1)

    try:
        wait_for(is_told)
    finally:
        os.kill(rank, signal.SIGCONT)


def is_rank(pid: int, directory: str) -> bool:
    try:
        command, environment = (Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
    except OSError:  # it has ended
        return False
    return directory.encode() in command and b"\0LOCAL_RANK=" in environment


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
