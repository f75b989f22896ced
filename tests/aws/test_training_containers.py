"""A run as training jobs whose containers really run, two hosts of two ranks; see containers.py."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.aws import training_run
from tests.aws.training_run import Jobs

if TYPE_CHECKING:
    from tests.aws.conftest import Aws

pytestmark = [pytest.mark.training, pytest.mark.timeout(600)]


@pytest.fixture
def jobs(aws: "Aws", tmp_path: Path) -> Jobs:
    return Jobs(aws, tmp_path / "fsx")


def test_a_run_ends_as_it_does_by_plain_processes(jobs: Jobs, tmp_path: Path) -> None:
    run = training_run.make(tmp_path / "fsx" / "ft")
    jobs.complete(run)
    assert all(run.is_done(stage.name) for stage in run.plan.stages)
