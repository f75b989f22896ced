"""Which training jobs are followed by another, by how they ended."""

from dataclasses import replace

import pytest

from hyperpod_ft.launch.protocol import JobState
from hyperpod_ft.runs.attempts import Attempt
from hyperpod_ft.runs.signals import NOTICE, NOTICE_STATUS
from hyperpod_ft.sagemaker.successors import KILLED_STATUS, decide_successor
from hyperpod_ft.sagemaker.training_jobs import TrainingJob

LOST = Attempt("x-train-1", "2026-01-01T00:00:00Z", KILLED_STATUS, False, (), 0, 0, 40, 41)
LEFT = replace(LOST, status=NOTICE_STATUS, signal=NOTICE)


def job(state: str, reason: str = "", began: bool = True) -> TrainingJob:
    return TrainingJob("x-train-2", JobState(state, reason), began, {})


@pytest.mark.parametrize(
    "reason",
    [
        "AlgorithmError: env: cannot import torch, exit code: 1",
        "AlgorithmError: precompile: exit status 137: Killed, exit code: 137",
        "AlgorithmError: , exit code: 1",
        "AlgorithmError: , exit code: 1370",
        "ClientError: access denied to s3://bucket/prefix",
        "CapacityError: Unable to provision requested ML compute capacity",
        "",
    ],
)
def test_a_failure_with_a_reason_of_its_own_is_not_a_loss(reason: str) -> None:
    assert decide_successor(job("FAILED", reason), [], [], 3) == "none"


@pytest.mark.parametrize(
    "found",
    [
        job("FAILED", "InternalServerError: We encountered an internal error."),
        job("FAILED", "AlgorithmError: , exit code: 137"),
        job("TIMEOUT"),
    ],
)
def test_a_job_that_could_not_say_anything_is_restarted(found: TrainingJob) -> None:
    assert decide_successor(found, [], [], 3) == "restart"
    assert decide_successor(found, [0], [], 3) == "restart", "a stage before was done"
    assert decide_successor(found, [0, 1], [], 3) == "none", "a stage said that it failed"
    assert decide_successor(replace(found, began=False), [], [], 3) == "none"


@pytest.mark.parametrize(
    ("found", "successor"),
    [
        (job("TIMEOUT"), "restart"),
        (job("FAILED", "InternalServerError"), "restart"),
        (job("FAILED", "AlgorithmError: , exit code: 137"), "none"),
    ],
)
def test_sigterm_counts_as_a_failure_unless_sagemaker_ended_the_job(found: TrainingJob, successor: str) -> None:
    assert decide_successor(found, [143], [], 3) == successor


@pytest.mark.parametrize("state", ["RUNNING", "FAILED"])
def test_one_that_left_before_its_limit_is_continued_also_without_restarts(state: str) -> None:
    restarts = [LOST, replace(LEFT, job_id="x-train-2")]
    assert decide_successor(job(state, "exit code: 138"), [NOTICE_STATUS], restarts, 0) == "continuation"
    assert decide_successor(job(state, "exit code: 138"), [NOTICE_STATUS], [LEFT], 3) == "none", "another job left"


def test_crashes_and_losses_of_a_submission_have_one_budget() -> None:
    crash = replace(LOST, status=1)
    found = job("FAILED", "InternalServerError")
    assert decide_successor(found, [], [LOST, crash, LEFT], 3) == "restart", "leaving at the limit is free"
    assert decide_successor(found, [], [LOST, crash, crash], 3) == "none"
    assert decide_successor(found, [], [], 0) == "none"
