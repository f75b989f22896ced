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


def test_an_interpreter_is_made_and_then_the_run_is_cancelled(aws: "Aws", tmp_path: Path) -> None:
    jobs = Jobs(aws, tmp_path / "fsx")
    # what starts as PID 1 misses the signal of `cancel`, as in a real container
    aws.scenario(seconds={"training.grace": 5.0}, capacity={"ml.c7i.xlarge": 0})
    values = training_run.values(tmp_path / "fsx" / "ft", jobs.section)
    values["env"] = {}  # the container makes the interpreter: the image's, with what it lacks
    command = Command(tmp_path, aws, values)
    types = ("cpu_instance_type=c7i.xlarge", "other_instance_types=[c7i.2xlarge, m7i.xlarge]")
    options = (word for one in types for word in ("--set", f"sagemaker.{one}"))
    command.run("submit", "run.yaml", "--launcher", "sagemaker", *options)
    run = command.opened
    wait_for(lambda: run.journal.is_done("env"), training_run.SECONDS, lambda: jobs.log(command.jobs()[0]), every=0.2)
    resources = jobs.describe(command.jobs()[0])["ResourceConfig"]
    assert resources["SelectedInstanceType"] == "ml.c7i.2xlarge", "the first with capacity"
    assert "cancelled" in command.run("cancel")
    command.wait_until_ended()
    assert command.created() == ["prepare-1"]
    assert jobs.describe(command.jobs()[0])["TrainingJobStatus"] == "Stopped"
