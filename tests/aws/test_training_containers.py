"""A run as training jobs whose containers really run (containers.py), two hosts of two ranks."""

import random
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

pytestmark = [pytest.mark.training, pytest.mark.timeout(1200)]

STEPS = {"max_steps": 20, "save_every_steps": 4}


@pytest.fixture
def jobs(aws: "Aws", tmp_path: Path) -> Jobs:
    return Jobs(aws, tmp_path / "fsx")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same run by launcher `process`: all four ranks on this machine, without containers."""
    run = training_run.make(tmp_path_factory.mktemp("undisturbed"), "process", **STEPS)
    deadline = time.monotonic() + training_run.SECONDS
    while Launchers().active(run):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert run.is_done("generate")
    return run


def test_interruptions_change_no_byte(jobs: Jobs, tmp_path: Path, undisturbed: Run) -> None:
    """While it starts and while it trains: all instances gone at once, or SIGTERM with time to save.

    In a store: every host loses its files. test_training_launcher.py has a run on a file system.
    """
    jobs.aws.scenario(seconds={"training.grace": 45})  # PID 1 may not be ready for SIGTERM
    run = training_run.make(tmp_path / "client", shared=undisturbed.root, **STEPS)
    (train,) = jobs.names(run)
    steps = [0, random.randint(1, 7), random.randint(8, 15)]
    for kind, step in zip(("internal error", "spot", "internal error"), steps, strict=True):
        jobs.interrupt(train, kind, step)
    jobs.wait_for_the_run(run)
    jobs.fetch(run)
    assert training_run.results(run) == training_run.results(undisturbed), steps
    history = [transition["Status"] for transition in jobs.describe(train)["SecondaryStatusTransitions"]]
    assert history.count("Interrupted") + history.count("Restarting") == 3, (history, steps)
