"""A training with a rank that is slower than the other, though each step takes both as long."""

import os

import pytest

from hyperpod_ft.job.watch import LIMIT
from hyperpod_ft.runs.job_files import ATTEMPT_DIRECTORY
from hyperpod_ft.runs.results import slowest_rank
from tests.training.conftest import Jobs, MakeRun

pytestmark = pytest.mark.training


def test_a_rank_whose_core_others_want_is_named(make_run: MakeRun, jobs: Jobs) -> None:
    run = make_run(settings={"parallelism": {"ranks_per_node": 2}, "training.max_steps": 10_000})
    jobs.environment = {"HANGS": "slow", LIMIT: "6", ATTEMPT_DIRECTORY: str(run.paths.directory)}
    job = jobs.start_train(run)
    named = f"watch: rank 1 on {os.uname().nodename} is slow: it works "
    job.wait_for(lambda: named in job.text())
    job.kill()
    slow = [row for row in slowest_rank.slow(slowest_rank.read(run.paths.slowest_ranks)) if row.rank == 1]
    assert len(slow) == 1 and str(slow[0]) in job.text() and slow[0].step >= 100
