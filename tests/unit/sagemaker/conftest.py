"""Fixtures: a run of training jobs, and the jobs in memory."""

import itertools
from collections.abc import Callable

import pytest

from hyperpod_ft.launch import submit
from hyperpod_ft.runs import jobs as submissions
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker import launcher as launcher_module
from tests.unit.sagemaker.training_jobs_in_memory import FSX, Jobs


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    made = Jobs()
    monkeypatch.setattr(launcher_module, "TrainingJobs", lambda _: made)
    seconds = itertools.count()
    monkeypatch.setattr(launcher_module, "utc_now", lambda: f"2026-01-01T00:00:{next(seconds):02d}Z")
    for module in (submit, launcher_module):
        monkeypatch.setattr(
            module, "snapshot", lambda copies: copies / "hyperpod-ft-0.1.0-0123456789abcdef0123456789abcdef"
        )  # the copy itself takes a second
    monkeypatch.setattr(submissions, "_git_state", lambda: None)
    return made


@pytest.fixture
def run(make_run: Callable[..., Run]) -> Run:
    return make_run(sagemaker=FSX, cluster__instance_type="c7i.4xlarge", cluster__max_restarts=2)
