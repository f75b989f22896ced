"""Which training job of a run comes next, and that it is created once."""

import threading
from unittest.mock import Mock

import pytest

from hyperpod_ft import publish
from hyperpod_ft.cli import main
from hyperpod_ft.cli.output import show_runs
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch import follow as follow_module
from hyperpod_ft.launch import submit
from hyperpod_ft.launch.follow import follow, log
from hyperpod_ft.launch.interface import JobState
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.status import status
from hyperpod_ft.runs import attempts
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import Selection
from hyperpod_ft.sagemaker.advance import states
from hyperpod_ft.sagemaker.groups import run_files_digest
from hyperpod_ft.sagemaker.store.sync import RunSync
from hyperpod_ft.sagemaker.training_jobs import TrainingJob
from tests.unit.sagemaker.training_jobs_in_memory import (
    RUNNING,
    Jobs,
    advance_run,
    as_jobs,
    finish,
    left_to_be_continued,
    name,
    shown,
    submitted,
)


def test_each_job_is_created_when_the_records_of_the_one_before_are_there(run: Run, jobs: Jobs) -> None:
    launchers = submitted(run)
    assert jobs.created == ["prepare-1"]
    assert {job.stage: job.job_id for job in run.journal.jobs()} == {
        **dict.fromkeys(("env", "download", "certify", "dataset"), name(run, "prepare")),
        "train": name(run, "train"),
        **dict.fromkeys(("consolidate", "merge", "generate"), name(run, "finish")),
    }
    jobs.set_state(name(run, "prepare"), RUNNING)
    finish(run, ["env"])
    current = shown(status(run, launchers))
    assert current == {
        **{"env": "done", "download": "running", "certify": "pending", "dataset": "pending"},
        **dict.fromkeys(("train", "consolidate", "merge", "generate"), "pending"),
    }
    # the record counts, not the state, which SageMaker changes later
    finish(run, ["download", "certify", "dataset"])
    assert advance_run(run, jobs) == name(run, "train")
    assert advance_run(run, jobs) is None
    jobs.set_state(name(run, "train"), RUNNING)
    finish(run, ["train"])
    launchers.advance(run)
    assert jobs.created == ["prepare-1", "train-1", "finish-1"]
    finish(run, ["consolidate", "merge", "generate"])
    before = dict(jobs.found)
    assert status(run, launchers).state == "done"
    assert jobs.found == before


def test_a_job_has_only_the_stages_that_are_left(run: Run, jobs: Jobs) -> None:
    finish(run, ["env", "download", "certify", "dataset", "train", "consolidate"])
    submitted(run)
    assert [request["HyperParameters"]["stages"] for request in jobs.requests] == ["merge generate"]


def test_a_selection_ends_with_its_stages(run: Run, jobs: Jobs) -> None:
    launchers = submitted(run)
    jobs.set_state(name(run, "prepare"), JobState("FAILED", "no disk"))
    finish(run, ["env", "download", "certify"])
    submit.submit(run, launchers, Selection(only="dataset"), "sagemaker")
    finish(run, ["dataset"])
    assert advance_run(run, jobs) is None
    assert jobs.created == ["prepare-1", "prepare-2"]


def test_only_who_has_the_scripts_creates_a_job(run: Run, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its container runs no others; who has looked at a run of another machine has none."""
    submitted(run)
    assert [request["HyperParameters"]["run_files"] for request in jobs.requests] == [
        run_files_digest(run.paths.directory)
    ]
    recorded = run.journal.jobs()
    left_to_be_continued(run, name(run, "prepare"))
    with monkeypatch.context() as patch:
        patch.setattr(RunSync, "has_run_files", lambda _: False)
        jobs.set_state(name(run, "prepare"), JobState("FAILED", "InternalServerError"))
        assert advance_run(run, jobs) is None and run.journal.jobs() == recorded, "another machine has submitted it"
    finish(run, ["env", "download", "certify", "dataset"])
    run.paths.script("train").unlink()
    assert advance_run(run, jobs) is None


def test_two_at_once_create_one_job(run: Run, jobs: Jobs) -> None:
    submitted(run)
    finish(run, ["env", "download", "certify", "dataset"])
    both = threading.Barrier(2)
    jobs.before_create = both.wait
    found: list[str | None] = []
    threads = [threading.Thread(target=lambda: found.append(advance_run(run, jobs))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found, key=str) == sorted([None, name(run, "train")], key=str)
    assert jobs.created == ["prepare-1", "train-1"]


def test_watch_keeps_a_run_going(run: Run, jobs: Jobs) -> None:
    launchers, said = submitted_and_lost(run, jobs), list[str]()
    next(follow(run, launchers, said.append))
    assert jobs.created == ["train-1", "train-2"]
    next(follow(run, launchers, said.append))
    assert said == [f"created training job {name(run, 'train', 2)}"], "then it is there"


def test_watch_continues_a_job_that_is_lost_while_it_looks(
    run: Run, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(run, ["env", "download", "certify", "dataset"])
    launchers, find, train = submitted(run), jobs.find, name(run, "train")
    jobs.set_state(train, RUNNING)

    def ends_then(asked: str) -> TrainingJob | None:
        found = find(asked)
        jobs.set_state(train, JobState("FAILED", "InternalServerError: We encountered an error"))
        return found

    monkeypatch.setattr(jobs, "find", ends_then)
    statuses = follow(run, launchers, lambda _: None, lambda _: None)
    assert shown(next(statuses))["train"] == "running"
    assert shown(next(statuses))["train"] == "pending"
    assert jobs.created == ["train-1", "train-2"]


def test_what_only_reads_or_is_about_to_change_a_run_creates_nothing(run: Run, jobs: Jobs) -> None:
    launchers = submitted_and_lost(run, jobs)
    before = run.journal.jobs()
    with pytest.raises(UserError, match="train"):
        main.compare([str(run.paths.directory)])
    main.list_command(run.paths.root)
    status(run, launchers)
    publish.write_text(run.paths.log("train", name(run, "train")), "step 41\n")
    assert "".join(log(run, launchers, "train", until_it_ends=False)) == "step 41\n"
    launchers.bring_small_files(run, also="sagemaker")
    submit.cancel(run, launchers)
    assert (jobs.created, run.journal.jobs(), attempts.history(run.paths, "train")) == (["train-1"], before, [])


def test_a_look_at_a_run_that_is_being_submitted_creates_nothing(run: Run, jobs: Jobs) -> None:
    """Its files may not be in the store yet."""
    launchers = submitted_and_lost(run, jobs)
    with publish.lock(run.paths.submit_lock):
        assert launchers.advance(run) == ""
    assert launchers.advance(run) == name(run, "train", 2)


def submitted_and_lost(run: Run, jobs: Jobs) -> Launchers:
    """Of a training job that SageMaker has lost, so that another is due."""
    finish(run, ["env", "download", "certify", "dataset"])
    launchers = submitted(run)
    jobs.set_state(name(run, "train"), JobState("FAILED", "InternalServerError: We encountered an error"))
    return launchers


def test_what_was_created_is_printed(run: Run, jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    submitted(run)
    show_runs.submitted(run, Launchers(), run.journal.jobs())
    assert f"created training job {name(run, 'prepare')}\n" in capsys.readouterr().out


def test_states_say_what_a_job_waits_for(run: Run, jobs: Jobs) -> None:
    submitted(run)
    found = states(run, as_jobs(jobs))
    assert found[name(run, "train")] == JobState("PENDING", f"after {name(run, 'prepare')}")
    jobs.set_state(name(run, "prepare"), JobState("FAILED"))
    found = states(run, as_jobs(jobs))
    assert not any(state.active for state in found.values())


def test_following_a_log_goes_on_while_sagemaker_does_not_answer(
    run: Run, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    launchers = submitted(run)
    finish(run, ["env", "download", "certify", "dataset"])
    train = str(advance_run(run, jobs))
    jobs.set_state(train, RUNNING)
    log_file = run.paths.log("train", train)
    publish.write_text(log_file, "step 1\n")
    # a look asks twice: which job is next, and for the states
    find, looks = jobs.find, iter((*["answer"] * 2, *["no answer"] * 4, "end"))

    def answers_at_times(name: str) -> TrainingJob | None:
        look = next(looks) if name == train else "answer"
        if look == "no answer":
            raise UserError(f"training job {name}: ThrottlingException")
        if look == "end":
            publish.write_text(log_file, "step 1\nstep 2\n")
            finish(run, ["train"])
        return find(name)

    monkeypatch.setattr(jobs, "find", answers_at_times)
    monkeypatch.setattr(follow_module, "_RETRY_SECONDS", 0.0)
    assert "".join(log(run, launchers, "train", until_it_ends=True)) == "step 1\nstep 2\n"


def test_following_a_log_ends_when_sagemaker_never_answers_again(
    run: Run, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    launchers = submitted(run)
    following = log(run, launchers, "env", until_it_ends=True)
    publish.write_text(run.paths.log("env", name(run, "prepare")), "begun\n")
    assert next(following) == "begun\n"
    monkeypatch.setattr(jobs, "find", Mock(side_effect=UserError("training job: no answer")))
    monkeypatch.setattr(follow_module, "_RETRY_SECONDS", 0.0)
    with pytest.raises(UserError, match="no answer; later: hyperpod-ft logs -f "):
        next(following)
