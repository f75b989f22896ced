"""A run as training jobs whose containers really run (containers.py), two hosts of two ranks."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.runs.run import Run
from tests.aws import training_run
from tests.aws.training_run import Jobs

if TYPE_CHECKING:
    from tests.aws.conftest import Aws

pytestmark = [pytest.mark.training, pytest.mark.timeout(600)]


@pytest.fixture
def jobs(aws: "Aws", tmp_path: Path) -> Jobs:
    return Jobs(aws, tmp_path / "fsx")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same run by launcher `process`: all four ranks on this machine, without containers."""
    run = training_run.make(tmp_path_factory.mktemp("undisturbed"), "process")
    deadline = time.monotonic() + training_run.SECONDS
    while Launchers().active(run):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert run.is_done("generate")
    return run


def test_a_run_ends_as_it_does_by_plain_processes(jobs: Jobs, tmp_path: Path, undisturbed: Run) -> None:
    run = training_run.make(tmp_path / "fsx" / "ft")
    jobs.wait_for_the_run(run)
    assert training_run.results(run) == training_run.results(undisturbed)
    prepare, train, finish = jobs.names(run)
    assert [name.split("-")[-2] for name in (prepare, train, finish)] == ["prepare", "train", "finish"]
    assert "restart" not in jobs.log(train)
