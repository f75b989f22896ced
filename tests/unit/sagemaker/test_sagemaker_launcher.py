"""Submitting a run as training jobs, and cancelling it."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft import annexes, publish
from hyperpod_ft.cli.output import show_runs
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch import submit
from hyperpod_ft.launch.follow import follow
from hyperpod_ft.launch.interface import JobState
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.process.launcher import ProcessLauncher
from hyperpod_ft.launch.slurm.launcher import SlurmLauncher
from hyperpod_ft.launch.status import status
from hyperpod_ft.planning.plan import StagePlan
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.records import Output, Record
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import Selection
from hyperpod_ft.sagemaker import advance as advance_module
from hyperpod_ft.sagemaker import launcher as launcher_module
from hyperpod_ft.sagemaker.store.sync import RunSync
from hyperpod_ft.sagemaker.training_jobs import TrainingJob
from tests.unit.sagemaker.training_jobs_in_memory import (
    FSX,
    RUNNING,
    Jobs,
    advance_run,
    finish,
    left_to_be_continued,
    name,
    shown,
    submitted,
)


def test_an_address_for_slurms_mail_is_answered_by_a_warning(
    make_run: Callable[..., Run], jobs: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(sagemaker=FSX, cluster__instance_type="c7i.4xlarge", cluster__mail_user="me@example.com")
    submitted(run)
    show_runs.submitted(run, Launchers(), run.journal.jobs())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: cluster.mail_user: ")


def test_the_command_for_a_shell_in_the_training_is_printed(
    make_run: Callable[..., Run], jobs: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(sagemaker=FSX | {"remote_debug": True}, cluster__instance_type="c7i.4xlarge")
    launchers = submitted(run)
    command = "aws ssm start-session --region eu-central-1 --target sagemaker-training-job:"
    assert f"{command}{name(run, 'train')}_algo-1\n" in capsys.readouterr().out
    submit.cancel(run, launchers)
    submit.submit(run, launchers, Selection(only="download"), "sagemaker")
    assert f"{command}{name(run, 'prepare', 2)}_algo-1\n" in capsys.readouterr().out


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError("training job: no answer")])
def test_an_interrupted_submission_stops_what_sagemaker_has_accepted(
    run: Run, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def create(request: Mapping[str, Any]) -> bool:
        Jobs.create(jobs, request)
        raise error

    monkeypatch.setattr(jobs, "create", create)
    pushed: list[Path] = []
    monkeypatch.setattr(RunSync, "push", lambda _, files: pushed.extend(files))
    with pytest.raises((KeyboardInterrupt, UserError)):
        submitted(run)
    assert jobs.stopped == [name(run, "prepare")]
    assert {run.paths.cancel_marker(job.stage, job.job_id) for job in run.journal.jobs()} <= set(pushed), (
        "containers see it"
    )
    finish(run, ["env", "download", "certify", "dataset"])
    assert advance_run(run, jobs, leaving=name(run, "prepare")) is None


def test_cancel_stops_the_job_and_those_that_wait(run: Run, jobs: Jobs) -> None:
    launchers = submitted(run)
    jobs.set_state(name(run, "prepare"), RUNNING)
    cancelled = submit.cancel(run, launchers)
    assert {job.stage for job in cancelled} == {stage.name for stage in run.plan.stages}
    assert jobs.stopped == [name(run, "prepare")]
    finish(run, ["env", "download", "certify", "dataset"])  # it was about to end
    assert advance_run(run, jobs, leaving=name(run, "prepare")) is None
    assert shown(status(run, launchers))["train"] == "cancelled"
    submit.submit(run, launchers, Selection(), "sagemaker")
    assert jobs.created == ["prepare-1", "train-2"]


def test_a_job_that_is_not_this_runs_is_not_asked_about_or_stopped(
    run: Run, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may write any name to the store's jobs.json, which is the client's a moment later."""
    launchers = submitted(run)
    others = ["payroll-train-1", f"x{name(run, 'train')}", "payroll"]
    for other in others:
        jobs.found[other] = TrainingJob(other, RUNNING, True, {})
        run.journal.add_job(replace(run.journal.jobs()[-1], job_id=other))
    asked: list[str] = []
    find = jobs.find
    monkeypatch.setattr(jobs, "find", lambda wanted: asked.append(wanted) or find(wanted))
    current = status(run, launchers)
    assert current.state in ("running", "pending")
    for job in run.journal.jobs():
        if job.job_id in others:
            assert launchers.log(run, job) is None
    submit.cancel(run, launchers)
    assert jobs.stopped == [name(run, "prepare")]
    assert asked and not set(asked) & set(others)


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to another user")
def test_a_run_of_another_user_creates_and_stops_nothing(run: Run, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    launchers = submitted(run)
    finish(run, ["env", "download", "certify", "dataset"])
    os.chown(run.paths.config_path, 65534, 65534)
    with monkeypatch.context() as patch:
        patch.setattr(launcher_module, "sync_of", lambda *_: pytest.fail("its directory may have links to our files"))
        assert launchers.advance(run) == ""
        assert status(run, launchers).state == "pending"
        assert all(launchers.log(run, job) is None for job in run.journal.jobs())
    with pytest.raises(UserError, match="belongs to another user"):  # a copy of this user's run.yaml names his jobs
        submit.cancel(run, launchers)
    assert not jobs.stopped
    assert jobs.created == ["prepare-1"]
    os.chown(run.paths.config_path, 0, 0)
    assert launchers.advance(run) == name(run, "train")


@pytest.mark.parametrize("moment", ["before it is created", "after `cancel` looked for jobs"])
def test_cancel_stops_a_job_that_is_created_meanwhile(
    run: Run, jobs: Jobs, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The container of a training that is continued looks for marks, and `cancel` comes before it creates the job."""
    launchers = submitted(run)
    finish(run, ["env", "download", "certify", "dataset"])
    assert advance_run(run, jobs) == name(run, "train")
    jobs.set_state(name(run, "train"), RUNNING)
    left_to_be_continued(run, name(run, "train"))
    if moment == "before it is created":
        jobs.before_create = lambda: submit.cancel(run, launchers)
        assert advance_run(run, jobs, leaving=name(run, "train")) is None
    else:

        def stop(stopped: str) -> None:
            jobs.set_state(stopped, JobState("CANCELLED"))
            with monkeypatch.context() as patch:
                patch.setattr(advance_module, "is_cancelled", lambda *_: False)
                advance_run(run, jobs, leaving=stopped)
            assert advance_module.is_cancelled(run, name(run, "train", 2)), "its container ends, whoever created it"

        monkeypatch.setattr(jobs, "stop", stop)
        submit.cancel(run, launchers)
        assert jobs.created[-1] == "train-2"
    assert jobs.found[name(run, "train", 2)].state.state == "CANCELLED"
    assert advance_run(run, jobs) is None
    jobs.before_create = lambda: None
    submitted(run)
    assert not advance_module.is_cancelled(run, name(run, "train", 3))


def test_a_new_run_is_looked_for_in_its_store(make_run: Callable[..., Run], jobs: Jobs) -> None:
    """Another machine may have submitted it."""
    run = make_run(sagemaker=FSX, cluster__instance_type="c7i.4xlarge", training__learning_rate=0.5)
    Launchers().bring_small_files(run, also="sagemaker")
    assert not run.paths.directory.exists()


def test_a_look_at_the_run_while_it_is_pushed_loses_no_job(
    run: Run, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It replaces the jobs here by those in the store, which has none of this submission before they are pushed."""
    monkeypatch.setattr(RunSync, "prepare", lambda _: run.paths.jobs_path.unlink(missing_ok=True))
    submitted(run)
    assert jobs.created == ["prepare-1"]
    assert run.journal.latest_jobs().keys() == {stage.name for stage in run.plan.stages}


def test_a_job_that_is_not_recorded_keeps_its_code(run: Run, jobs: Jobs) -> None:
    """A submission was killed: the successor of what it created runs the same copy."""
    launchers = submitted(run)
    (job, *_), code = run.journal.jobs(), run.journal.jobs()[0].code
    assert code
    run.paths.jobs_path.unlink()
    publish.write_json(run.paths.jobs_path, [asdict(replace(job, job_id="other"))])
    found = [job for job in launchers.active(run) if job.job_id == name(run, "prepare")]
    assert {job.code for job in found} == {code} and len({job.submitted for job in found}) == 1


def test_a_refused_job_leaves_nothing_that_waits(run: Run, jobs: Jobs) -> None:
    jobs.refuse = "ResourceLimitExceeded"
    with pytest.raises(UserError, match="ResourceLimitExceeded"):
        submitted(run)
    jobs.refuse = ""
    launchers = submitted(run)
    assert jobs.created == ["prepare-2"]
    # later, when the records are there, and nobody watches
    finish(run, ["env", "download", "certify", "dataset"])
    jobs.refuse = "ResourceLimitExceeded"
    current = next(follow(run, launchers))
    assert "ResourceLimitExceeded" in current.note
    assert shown(current)["train"] == "pending"
    jobs.refuse = ""
    next(follow(run, launchers))
    assert jobs.created == ["prepare-2", "train-2"]


def test_a_second_submission_waits_for_the_first(run: Run, jobs: Jobs) -> None:
    launchers = submitted(run)
    with pytest.raises(UserError, match="still at work"):
        submit.submit(run, launchers, Selection(), "sagemaker")


def test_a_job_that_a_killed_submission_left_unrecorded_is_found(run: Run, jobs: Jobs) -> None:
    launchers = submitted(run)
    run.paths.jobs_path.unlink()
    assert {job.job_id for job in launchers.active(run, also="sagemaker")} == {name(run, "prepare")}
    assert {job.stage for job in run.journal.jobs()} == {"env", "download", "certify", "dataset"}


def test_what_the_service_would_refuse_is_refused_before_anything_is_recorded(
    make_run: Callable[..., Run], jobs: Jobs
) -> None:
    run = make_run(sagemaker=FSX | {"cpu_instance_type": "x99.huge"}, cluster__instance_type="c7i.4xlarge")
    with pytest.raises(UserError, match=r"x99\.huge"):
        submitted(run)
    assert (run.journal.jobs(), jobs.created) == ([], [])


def test_a_run_file_without_the_section_is_refused(make_run: Callable[..., Run], jobs: Jobs) -> None:
    with pytest.raises(UserError, match="no section sagemaker"):
        submitted(make_run())


def test_an_interpreter_of_the_image_need_not_be_here(make_run: Callable[..., Run], jobs: Jobs) -> None:
    run = make_run(sagemaker=FSX, cluster__instance_type="c7i.4xlarge", env__python="/opt/venv/bin/python")
    submitted(run)
    assert jobs.requests[0]["HyperParameters"]["python"] == "/opt/venv/bin/python"


def test_on_slurm_a_run_of_training_jobs_makes_an_environment(make_run: Callable[..., Run], jobs: Jobs) -> None:
    """Containers have one of their own, and record that; the file system that Slurm's nodes share has none."""
    run = make_run(sagemaker=FSX, cluster__instance_type="c7i.4xlarge", env={})
    finish(run, ["env", "download", "certify", "dataset"])
    submitted(run)
    assert [job.stage for job in run.journal.jobs()] == ["train", "consolidate", "merge", "generate"]
    submit.cancel(run, Launchers())
    slurm = Recording()
    submit.submit(run, Launchers((slurm, *annexes.launchers())), Selection(), "slurm")
    assert slurm.stages[:2] == ["env", "train"]


@dataclass(frozen=True)
class Recording(SlurmLauncher):
    """A launcher that only notes what is submitted."""

    stages: list[str] = field(default_factory=list)

    def submit(self, run: Run, stages: Iterable[Any], after: object) -> None:
        self.stages.extend(stage.name for stage in stages)

    def states(self, *_: object, **__: object) -> dict[Job, JobState]:
        return {}


def test_the_code_of_a_run_is_that_of_its_submission(run: Run, jobs: Jobs) -> None:
    submitted(run)
    assert {job["code"] for job in json.loads(run.paths.jobs_path.read_text())} == {
        "hyperpod-ft-0.1.0-0123456789abcdef0123456789abcdef"
    }
    (channel, _) = jobs.requests[0]["InputDataConfig"]
    assert (
        channel["DataSource"]["FileSystemDataSource"]["DirectoryPath"]
        == "/abcdefgh/hyperpod-ft/code/hyperpod-ft-0.1.0-0123456789abcdef0123456789abcdef"
    )


def test_another_launcher_runs_what_only_the_store_has(run: Run, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its jobs read the outputs on their own volume."""
    chosen: list[str] = []

    def noted(_: ProcessLauncher, __: Run, stages: Sequence[StagePlan], *___: object) -> None:
        chosen.extend(stage.name for stage in stages)

    monkeypatch.setattr(ProcessLauncher, "submit", noted)
    submitted(run)
    jobs.set_state(name(run, "prepare"), JobState("FAILED"))
    output, fingerprint = Output("models/a", 3, ""), run.plan["download"].fingerprint
    record = Record("download", fingerprint, {}, (output,), {}, "2026-01-01T00:00:00Z", 1.0, "algo-1", "x")
    record.write(run.paths.record_path("download"))
    publish.write_json(run.paths.store_listing, {output.path: output.size})
    assert run.journal.is_done("download")
    submit.submit(run, Launchers(), Selection(), "process")
    assert "download" in chosen
