"""Launcher `sagemaker` by its commands, on training jobs whose containers really run (containers.py)."""

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hyperpod_ft.processes import all_pids
from hyperpod_ft.runs.job_files import NOTICE
from tests.aws import training_run
from tests.aws.kit import ROOT
from tests.aws.training_command import Command
from tests.aws.training_run import Jobs
from tests.waiting import wait_for

if TYPE_CHECKING:
    from tests.aws.conftest import Aws

pytestmark = [pytest.mark.training, pytest.mark.timeout(600)]


def test_a_container_that_may_not_create_the_next_job_says_so_and_watch_does(aws: "Aws", tmp_path: Path) -> None:
    jobs = Jobs(aws, tmp_path / "fsx")
    jobs.deny("sagemaker:CreateTrainingJob")
    command = Command(tmp_path, aws, training_run.values(tmp_path / "fsx" / "ft", jobs.section))
    command.run("submit", "run.yaml", "--launcher", "sagemaker")
    command.wait_until_ended()
    assert command.created() == ["prepare-1"]
    log = training_run.log(command.aws, command.jobs()[0])
    assert "sagemaker:CreateTrainingJob" in log
    assert "the next training job was not created; hyperpod-ft watch creates it" in log
    described = command.aws.client("sagemaker").describe_training_job(TrainingJobName=command.jobs()[0])
    assert described["TrainingJobStatus"] == "Completed", "its own stages are done"
    assert "hyperpod-ft watch" in command.run("status")
    assert command.created() == ["prepare-1"]
    command.start("watch")
    wait_for(lambda: command.created() == ["prepare-1", "train-1"], 60)
    command.run("cancel")
    command.wait_until_ended()


@pytest.fixture
def in_store(aws: "Aws", tmp_path: Path) -> Command:
    section = Jobs(aws).section
    values = training_run.values(tmp_path / "root", section, nodes=1, max_steps=40, save_every_steps=1000)
    values["cluster"]["time_limit"] = "2"  # minutes, with notice 24 s before the end
    values["parallelism"] = {"ranks_per_node": 1}
    for section, example in (("model", "tiny-llama"), ("dataset", "qa.jsonl")):  # which no container sees
        copied = shutil.copytree if section == "model" else shutil.copyfile
        values[section]["source"] = str(copied(ROOT / "examples/quickstart" / example, tmp_path / example))
    values["env"] = {}  # the container makes the interpreter: the image's, with what it lacks
    return Command(tmp_path, aws, values)


def test_a_run_in_a_store_continues_unwatched(in_store: Command, tmp_path: Path) -> None:
    """Only `submit` runs here until the model is there: each job's container creates the next.

    Training takes longer than the job's time limit: it saves a checkpoint on notice, and another job resumes from it.
    """
    command = in_store
    command.run("submit", "run.yaml", "--launcher", "sagemaker")
    following = command.start("logs", "train", "-f")
    freeze_until_notice(command)
    text, _ = following.communicate(timeout=300)
    assert following.returncode == 0, text
    assert "step 40/40" in text
    assert "train: done" in text
    assert "generate: done" in command.run("logs", "generate", "-f")
    created = command.created()
    assert created[:3] + created[-1:] == ["prepare-1", "train-1", "train-2", "finish-1"]
    assert all(name.startswith("train-") for name in created[3:-1]), "a slow machine may need a third"
    current = command.status()
    assert current["state"] == "done"
    assert re.match(r"s3://sagemaker-hyperpod-ft-\w+/ft/runs/quick/", current["model"])
    run = command.opened
    assert not run.paths.tuned_model.exists(), "the model is in the store, not here"
    assert "trained" in command.run("status")
    assert json.loads(command.run("compare", str(run.paths.directory), "--json"))["runs"][0]["steps"] == 40
    first, second = (training_run.log(command.aws, job) for job in command.jobs()[1:3])
    saved = re.search(r"close to the time limit; the next job resumes from step (\d+)", first)
    assert saved, first
    assert f"train: resuming from step {saved[1]}\n" in second


def freeze_until_notice(command: Command) -> None:
    """Suspend the training rank until the notice of the time limit has reached it."""
    wait_for(
        lambda: "train-1" in command.created() and "\nstep 1/40" in training_run.log(command.aws, command.jobs()[1]),
        600,
        every=0.5,
    )
    (rank,) = (pid for pid in all_pids() if is_rank(pid, str(command.directory)))
    os.kill(rank, signal.SIGSTOP)
    pending = re.compile(r"^ShdPnd:\t(\w+)$", re.MULTILINE)

    def is_told() -> bool:
        found = pending.search(Path(f"/proc/{rank}/status").read_text())
        return found is not None and bool(int(found[1], 16) & 1 << NOTICE - 1)

    try:
        wait_for(is_told, 600, every=0.5)
    finally:
        os.kill(rank, signal.SIGCONT)


def is_rank(pid: int, directory: str) -> bool:
    try:
        command, environment = (Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
    except OSError:  # it has ended
        return False
    return directory.encode() in command and b"\0LOCAL_RANK=" in environment
