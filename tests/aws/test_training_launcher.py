"""Launcher `sagemaker` by its commands, on training jobs whose containers really run (containers.py)."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.aws import training_run
from tests.aws.training_command import Command
from tests.aws.training_run import Jobs
from tests.waiting import wait_for

if TYPE_CHECKING:
    from tests.aws.conftest import Aws

pytestmark = [pytest.mark.training, pytest.mark.timeout(1200)]


def test_a_container_that_may_not_create_the_next_job_says_so_and_watch_does(aws: "Aws", tmp_path: Path) -> None:
    jobs = Jobs(aws, tmp_path / "fsx")
    jobs.deny("sagemaker:CreateTrainingJob")
    # what starts as PID 1 misses the signal of `cancel`, as in a real container
    aws.scenario(seconds={"training.grace": 5.0})
    values = training_run.values(tmp_path / "fsx" / "ft", jobs.section)
    values["env"] = {}  # the container makes the interpreter: the image's, with what it lacks
    command = Command(tmp_path, aws, values)
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
    wait_for(lambda: command.created() == ["prepare-1", "train-1"], training_run.SECONDS)
    command.run("cancel")
    command.wait_until_ended()
