"""Which training job follows one that has ended: what SageMaker says and what its containers left decide."""

from dataclasses import replace
from unittest.mock import Mock

import pytest

from hyperpod_ft import publish
from hyperpod_ft.launch import submit
from hyperpod_ft.launch.interface import JobState
from hyperpod_ft.launch.status import status
from hyperpod_ft.runs import attempts
from hyperpod_ft.runs.attempts import Attempt
from hyperpod_ft.runs.job_files import NOTICE, NOTICE_STATUS
from hyperpod_ft.runs.journal import Journal
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import Selection
from hyperpod_ft.sagemaker.training_jobs import TrainingJob
from tests.unit.sagemaker.training_jobs_in_memory import (
    COMPLETED,
    RUNNING,
    Jobs,
    advance_run,
    finish,
    left_to_be_continued,
    name,
    shown,
    submitted,
)


def test_a_training_that_left_early_is_continued(run: Run, jobs: Jobs) -> None:
    finish(run, ["env", "download", "certify", "dataset"])
    launchers = submitted(run)
    jobs.set_state(name(run, "train"), RUNNING)
    left_to_be_continued(run, name(run, "train"))
    assert advance_run(run, jobs) is None, "it is still running"
    assert advance_run(run, jobs, leaving=name(run, "train")) == name(run, "train", 2)
    jobs.set_state(name(run, "train"), JobState("FAILED"))
    assert advance_run(run, jobs) is None
    assert shown(status(run, launchers))["train"] == "pending"
    continued = run.journal.latest_jobs()["train"]
    assert (continued.submitted, continued.code) == (run.journal.jobs()[0].submitted, run.journal.jobs()[0].code)
    assert jobs.requests[-1]["InputDataConfig"] == jobs.requests[0]["InputDataConfig"]


def test_a_job_that_ends_while_its_run_is_looked_at_has_not_failed(
    run: Run, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`logs -f` goes on with the log of the job that continues it."""
    launchers = submitted(run)
    finish(run, ["env", "download", "certify", "dataset"])
    assert advance_run(run, jobs) == name(run, "train")
    jobs.set_state(name(run, "train"), RUNNING)
    find = jobs.find

    def ends_when_it_is_looked_at(wanted: str) -> TrainingJob | None:
        monkeypatch.setattr(jobs, "find", find)
        left_to_be_continued(run, name(run, "train"))
        assert advance_run(run, jobs, leaving=name(run, "train")) == name(run, "train", 2)
        jobs.set_state(name(run, "train"), JobState("FAILED"))
        return find(wanted)

    monkeypatch.setattr(jobs, "find", ends_when_it_is_looked_at)
    (train,) = (stage for stage in status(run, launchers).stages if stage.stage == "train")
    assert (train.state, train.job_id) == ("pending", name(run, "train", 2))


def test_a_restart_is_recorded_with_the_job_that_it_is(run: Run, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is killed before it has recorded the successor has not used up a restart."""
    finish(run, ["env", "download", "certify", "dataset"])
    submitted(run)
    jobs.set_state(name(run, "train"), JobState("TIMEOUT"))
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(Journal, "add_job", Mock(side_effect=KeyboardInterrupt))
        advance_run(run, jobs)
    assert attempts.history(run.paths, "train") == []
    advance_run(run, jobs)
    assert [restart.job_id for restart in attempts.history(run.paths, "train")] == [name(run, "train")]


def test_a_job_that_completed_is_not_repeated_when_its_outputs_are_deleted(run: Run, jobs: Jobs) -> None:
    """Checkpoints may be deleted once they are consolidated."""
    finish(run, ["env", "download", "certify", "dataset"])
    submitted(run)
    finish(run, ["train", "consolidate", "merge", "generate"])
    jobs.set_state(name(run, "train"), COMPLETED)
    run.paths.record_path("train").unlink()
    assert advance_run(run, jobs) is None
    assert jobs.created == ["train-1"]


def test_crashes_in_a_container_use_up_the_submissions_restarts(run: Run, jobs: Jobs) -> None:
    finish(run, ["env", "download", "certify", "dataset"])
    launchers = submitted(run)
    crash = Attempt(name(run, "train"), "2026-01-01T00:00:00Z", 1, False, (), 0, 0, 40, 41)
    attempts.add(run.paths, "train", replace(crash, status=NOTICE_STATUS, signal=NOTICE))  # leaving early is free
    attempts.add(run.paths, "train", crash)
    attempts.add(run.paths, "train", replace(crash, job_id="of-an-earlier-submission-train-9"))
    jobs.set_state(name(run, "train"), JobState("FAILED", "InternalServerError"))
    assert advance_run(run, jobs) == name(run, "train", 2)
    jobs.set_state(name(run, "train", 2), JobState("FAILED", "InternalServerError"))
    assert advance_run(run, jobs) is None, "two restarts: a crash and a loss"
    assert "restart 2 of 2" in status(run, launchers).stages[4].restarts
    left_to_be_continued(run, name(run, "train", 2))
    assert advance_run(run, jobs) == name(run, "train", 3), "to leave early needs no restart"


def test_lost_instances_are_replaced_as_often_as_restarts_are_allowed(run: Run, jobs: Jobs) -> None:
    finish(run, ["env", "download", "certify", "dataset"])
    launchers = submitted(run)
    for number in (1, 2, 3):
        jobs.set_state(name(run, "train", number), JobState("FAILED", "InternalServerError: We encountered an error"))
        advance_run(run, jobs)
    assert jobs.created == ["train-1", "train-2", "train-3"]
    current = status(run, launchers)
    assert current.failed is not None
    assert "InternalServerError" in current.failed.detail
    submit.submit(run, launchers, Selection(), "sagemaker")
    jobs.set_state(name(run, "train", 4), JobState("TIMEOUT"))
    assert advance_run(run, jobs) == name(run, "train", 5), "another submission has its own restarts"


@pytest.mark.parametrize(
    ("state", "began", "exit_status"),
    [
        (JobState("FAILED", "exit status 1"), True, "1"),
        (JobState("FAILED", "AlgorithmError: env: cannot import torch, exit code: 1"), True, ""),
        (JobState("FAILED", "AlgorithmError: precompile: exit status 137: Killed, exit code: 137"), True, ""),
        (JobState("FAILED", "AlgorithmError: , exit code: 1370"), True, ""),
        (JobState("FAILED", "AlgorithmError: , exit code: 137"), True, "143"),
        (JobState("FAILED", "no value"), True, "2"),
        (JobState("FAILED", "rank 0: SIGTERM at step 3"), True, "143"),
        (JobState("CANCELLED"), True, ""),
        (JobState("CANCELLED"), True, "143"),
        (JobState("DEADLINE", "no spot instances"), True, ""),
        (JobState("FAILED", "CapacityError: Unable to provision requested ML compute capacity"), False, ""),
        (JobState("FAILED", "InternalServerError: CapacityError, before it began"), False, ""),
    ],
)
def test_what_no_other_job_would_cure_is_not_continued(
    run: Run, jobs: Jobs, state: JobState, began: bool, exit_status: str
) -> None:
    finish(run, ["env", "download", "certify", "dataset"])
    launchers = submitted(run)
    jobs.set_state(name(run, "train"), state, began)
    if exit_status:
        publish.write_text(run.paths.exit_marker("train", name(run, "train")), f"{exit_status}\n")
    current = status(run, launchers)
    assert jobs.created == ["train-1"]
    assert shown(current)["train"] == ("cancelled" if state.state == "CANCELLED" else "failed")
    assert shown(current)["merge"] in ("cancelled", "not run"), "it does not wait for ever"
    if not began:
        assert "CapacityError" in current.stages[4].detail


@pytest.mark.parametrize(
    ("state", "exit_status"),
    [
        (JobState("TIMEOUT"), "143"),
        (JobState("FAILED", "InternalServerError"), "143"),
        (JobState("FAILED", "AlgorithmError: , exit code: 137"), ""),
    ],
)
def test_what_could_not_say_why_it_ended_is_restarted(run: Run, jobs: Jobs, state: JobState, exit_status: str) -> None:
    """Killed, or ended by SageMaker, which sends SIGTERM at the limit."""
    finish(run, ["env", "download", "certify", "dataset"])
    submitted(run)
    jobs.set_state(name(run, "train"), state)
    if exit_status:
        publish.write_text(run.paths.exit_marker("train", name(run, "train")), f"{exit_status}\n")
    assert advance_run(run, jobs) == name(run, "train", 2)


def test_stages_on_cpus_are_not_repeated(run: Run, jobs: Jobs) -> None:
    submitted(run)
    jobs.set_state(name(run, "prepare"), JobState("FAILED", "InternalServerError"))
    assert advance_run(run, jobs) is None
