"""Which training job comes next: records, SageMaker's answers and what containers left decide. Training jobs are a
stand-in in memory here; tests/aws has one that runs containers."""

import itertools
import json
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from hyperpod_ft import publish
from hyperpod_ft.cli import main, show_runs
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch import submit
from hyperpod_ft.launch.follow import follow, log
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.process import ProcessLauncher
from hyperpod_ft.launch.protocol import JobState
from hyperpod_ft.launch.sagemaker import advance as advance_module
from hyperpod_ft.launch.sagemaker import launcher as launcher_module
from hyperpod_ft.launch.sagemaker.advance import advance, states
from hyperpod_ft.launch.sagemaker.groups import job_name
from hyperpod_ft.launch.sagemaker.place import OnFileSystem
from hyperpod_ft.launch.sagemaker.training_jobs import TrainingJob, TrainingJobs
from hyperpod_ft.launch.status import RunStatus, status
from hyperpod_ft.planning.plan import StagePlan
from hyperpod_ft.runs import restarts
from hyperpod_ft.runs.container import NOTICE, NOTICE_STATUS
from hyperpod_ft.runs.records import Output, Record
from hyperpod_ft.runs.restarts import Attempt
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import Selection
from tests.unit.launch.sagemaker.test_training_request import FSX

PENDING, RUNNING, COMPLETED = JobState("PENDING"), JobState("RUNNING"), JobState("COMPLETED")


@dataclass
class Jobs:
    """Training jobs that do nothing: tests say what becomes of them. Names are unique, as SageMaker's are."""

    found: dict[str, TrainingJob] = field(default_factory=dict)
    requests: list[Mapping[str, Any]] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    refuse: str = ""
    session: Any = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    before_create: Callable[[], object] = lambda: None

    def create(self, request: Mapping[str, Any]) -> bool:
        self.before_create()
        if self.refuse:
            raise UserError(f"training job {request['TrainingJobName']}: {self.refuse}")
        with self._lock:
            name = request["TrainingJobName"]
            if name in self.found:
                return False
            self.found[name] = TrainingJob(name, PENDING, False, request["HyperParameters"])
            self.requests.append(request)
        return True

    def find(self, name: str) -> TrainingJob | None:
        return self.found.get(name)

    def names(self, prefix: str) -> list[str]:
        return sorted(name for name in self.found if name.startswith(prefix))

    def stop(self, name: str) -> None:
        self.stopped.append(name)
        self.becomes(name, JobState("CANCELLED"))

    def becomes(self, name: str, state: JobState, began: bool = True) -> None:
        self.found[name] = replace(self.found[name], state=state, began=began)

    @property
    def created(self) -> list[str]:
        """Group and number of each job, oldest first."""
        return ["-".join(request["TrainingJobName"].split("-")[-2:]) for request in self.requests]


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    made = Jobs()
    monkeypatch.setattr(launcher_module, "TrainingJobs", lambda _: made)
    seconds = itertools.count()
    monkeypatch.setattr(launcher_module, "utc_now", lambda: f"2026-01-01T00:00:{next(seconds):02d}Z")
    for module in (submit, launcher_module):
        monkeypatch.setattr(module, "snapshot", lambda copies: copies / "0.1.0-abc")  # the copy itself takes a second
    monkeypatch.setattr(submit, "_git_state", lambda: None)
    return made


@pytest.fixture
def run(make_run: Callable[..., Run]) -> Run:
    return make_run(sagemaker=FSX, cluster__instance_type="c7i.4xlarge", cluster__max_restarts=2)


def finish(run: Run, stages: Iterable[str]) -> None:
    for stage in stages:
        record = Record(stage, run.plan[stage].fingerprint, {}, (), {}, "2026-01-01T00:00:00Z", 1.0, "algo-1", "x")
        record.write(run.record_path(stage))


def name(run: Run, group: str, number: int = 1) -> str:
    return job_name(run, group, number)


def go_on(run: Run, jobs: Jobs, leaving: str = "") -> str | None:
    return advance(run, as_jobs(jobs), OnFileSystem(), leaving)


def as_jobs(jobs: Jobs) -> TrainingJobs:
    return jobs  # type: ignore[return-value]


def submitted(run: Run, **selection: Any) -> Launchers:
    launchers = Launchers()
    submit.submit(run, launchers, Selection(**selection), "sagemaker")
    return launchers


def shown(current: RunStatus) -> dict[str, str]:
    return {stage.stage: stage.state for stage in current.stages}


def left_to_be_continued(run: Run, job: str, checkpoint: int = 40) -> None:
    """What a supervisor leaves that has saved a checkpoint shortly before the limit."""
    restarts.add(
        run, "train", Attempt(job, "2026-01-01T00:00:00Z", NOTICE_STATUS, False, (), NOTICE, 0, checkpoint, 41)
    )
    publish.write_text(run.exit_marker("train", job), f"{NOTICE_STATUS}\n")


def test_each_job_is_created_when_the_records_of_the_one_before_are_there(run: Run, jobs: Jobs) -> None:
    launchers = submitted(run)
    assert jobs.created == ["prepare-1"]
    assert {job.stage: job.job_id for job in run.jobs()} == {
        **dict.fromkeys(("env", "download", "dataset"), name(run, "prepare")),
        "train": name(run, "train"),
        **dict.fromkeys(("consolidate", "merge", "generate"), name(run, "finish")),
    }
    jobs.becomes(name(run, "prepare"), RUNNING)
    finish(run, ["env"])
    current = shown(status(run, launchers))
    assert current == {
        **{"env": "done", "download": "running", "dataset": "pending"},
        **dict.fromkeys(("train", "consolidate", "merge", "generate"), "pending"),
    }
    # the record counts, not the state, which SageMaker changes later
    finish(run, ["download", "dataset"])
    assert go_on(run, jobs) == name(run, "train")
    assert go_on(run, jobs) is None
    jobs.becomes(name(run, "train"), RUNNING)
    finish(run, ["train"])
    status(run, launchers, advance=True)
    assert jobs.created == ["prepare-1", "train-1", "finish-1"]
    finish(run, ["consolidate", "merge", "generate"])
    before = dict(jobs.found)
    assert status(run, launchers, advance=True).state == "done"
    assert jobs.found == before


def test_a_job_has_only_the_stages_that_are_left(run: Run, jobs: Jobs) -> None:
    finish(run, ["env", "download", "dataset", "train", "consolidate"])
    submitted(run)
    assert [request["HyperParameters"]["stages"] for request in jobs.requests] == ["merge generate"]


def test_a_selection_ends_with_its_stages(run: Run, jobs: Jobs) -> None:
    launchers = submitted(run)
    jobs.becomes(name(run, "prepare"), JobState("FAILED", "no disk"))
    finish(run, ["env", "download"])
    submit.submit(run, launchers, Selection(only="dataset"), "sagemaker")
    finish(run, ["dataset"])
    assert go_on(run, jobs) is None
    assert jobs.created == ["prepare-1", "prepare-2"]


def test_two_at_once_create_one_job(run: Run, jobs: Jobs) -> None:
    submitted(run)
    finish(run, ["env", "download", "dataset"])
    both = threading.Barrier(2)
    jobs.before_create = both.wait
    found: list[str | None] = []
    threads = [threading.Thread(target=lambda: found.append(go_on(run, jobs))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found, key=str) == [None, name(run, "train")] or sorted(found, key=str)[::-1] == [
        name(run, "train"),
        None,
    ]
    assert jobs.created == ["prepare-1", "train-1"]


def test_the_last_act_of_a_container_creates_the_next_job(run: Run, jobs: Jobs) -> None:
    submitted(run)
    jobs.becomes(name(run, "prepare"), RUNNING)
    finish(run, ["env", "download", "dataset"])
    assert go_on(run, jobs, leaving=name(run, "prepare")) == name(run, "train")


def test_a_training_that_left_early_is_continued(run: Run, jobs: Jobs) -> None:
    finish(run, ["env", "download", "dataset"])
    launchers = submitted(run)
    jobs.becomes(name(run, "train"), RUNNING)
    left_to_be_continued(run, name(run, "train"))
    assert go_on(run, jobs) is None, "it is still running"
    assert go_on(run, jobs, leaving=name(run, "train")) == name(run, "train", 2)
    jobs.becomes(name(run, "train"), JobState("FAILED"))
    assert go_on(run, jobs) is None
    assert shown(status(run, launchers))["train"] == "pending"
    continued = run.latest_jobs()["train"]
    assert (continued.submitted, continued.code) == (run.jobs()[0].submitted, run.jobs()[0].code)
    assert jobs.requests[-1]["InputDataConfig"] == jobs.requests[0]["InputDataConfig"]


def test_only_who_is_told_to_creates_jobs(run: Run, jobs: Jobs) -> None:
    """`list`, `logs` and `compare` read; `status RUN` and `--watch` also create, and say so."""
    finish(run, ["env", "download", "dataset"])
    launchers = submitted(run)
    jobs.becomes(name(run, "train"), JobState("FAILED", "InternalServerError: We encountered an error"))
    before = run.jobs()
    assert status(run, launchers).created == ""
    publish.write_text(run.log("train", name(run, "train")), "step 41\n")
    assert "".join(log(run, launchers, "train", until_it_ends=True)) == "step 41\n"
    main.list_command(run.root)
    with pytest.raises(UserError, match="train"):
        main.compare([str(run.directory)])
    assert (jobs.created, run.jobs(), restarts.history(run, "train")) == (["train-1"], before, [])
    watched = next(follow(run, launchers))
    assert (watched.created, jobs.created) == (name(run, "train", 2), ["train-1", "train-2"])
    assert status(run, launchers, advance=True).created == ""


def test_what_was_created_is_printed(run: Run, jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    launchers = submitted(run)
    show_runs.submitted(run, run.jobs())
    assert f"created training job {name(run, 'prepare')}\n" in capsys.readouterr().out
    finish(run, ["env", "download", "dataset"])
    show_runs.status(status(run, launchers, advance=True))
    assert capsys.readouterr().out.startswith(f"created training job {name(run, 'train')}\n")
    show_runs.status(status(run, launchers, advance=True))
    assert "created training job" not in capsys.readouterr().out


def test_an_address_for_slurms_mail_is_answered_by_a_warning(
    make_run: Callable[..., Run], jobs: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(sagemaker=FSX, cluster__instance_type="c7i.4xlarge", cluster__mail_user="me@example.com")
    submitted(run)
    show_runs.submitted(run, run.jobs())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: cluster.mail_user: ")


def test_a_restart_is_recorded_with_the_job_that_it_is(run: Run, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is killed before it has recorded the follower has not used up a restart."""
    finish(run, ["env", "download", "dataset"])
    submitted(run)
    jobs.becomes(name(run, "train"), JobState("TIMEOUT"))
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(Run, "add_job", Mock(side_effect=KeyboardInterrupt))
        go_on(run, jobs)
    assert restarts.history(run, "train") == []
    go_on(run, jobs)
    assert [restart.job_id for restart in restarts.history(run, "train")] == [name(run, "train")]


def test_a_job_that_completed_is_not_repeated_when_its_outputs_are_deleted(run: Run, jobs: Jobs) -> None:
    """Checkpoints may be deleted once they are consolidated."""
    finish(run, ["env", "download", "dataset"])
    submitted(run)
    finish(run, ["train", "consolidate", "merge", "generate"])
    jobs.becomes(name(run, "train"), COMPLETED)
    run.record_path("train").unlink()
    assert go_on(run, jobs) is None
    assert jobs.created == ["train-1"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError("training job: no answer")])
def test_an_interrupted_submission_stops_what_sagemaker_has_accepted(
    run: Run, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def create(request: Mapping[str, Any]) -> bool:
        Jobs.create(jobs, request)
        raise error

    monkeypatch.setattr(jobs, "create", create)
    published: list[Path] = []
    monkeypatch.setattr(OnFileSystem, "publish", lambda _, files: published.extend(files))
    with pytest.raises((KeyboardInterrupt, UserError)):
        submitted(run)
    assert jobs.stopped == [name(run, "prepare")]
    assert {run.cancel_marker(job.stage, job.job_id) for job in run.jobs()} <= set(published), "containers see it"
    finish(run, ["env", "download", "dataset"])
    assert go_on(run, jobs, leaving=name(run, "prepare")) is None


def test_crashes_in_a_container_use_up_the_submissions_restarts(run: Run, jobs: Jobs) -> None:
    finish(run, ["env", "download", "dataset"])
    launchers = submitted(run)
    crash = Attempt(name(run, "train"), "2026-01-01T00:00:00Z", 1, False, (), 0, 0, 40, 41)
    restarts.add(run, "train", crash)
    restarts.add(run, "train", replace(crash, job_id="of-an-earlier-submission-train-9"))
    jobs.becomes(name(run, "train"), JobState("FAILED", "InternalServerError"))
    assert go_on(run, jobs) == name(run, "train", 2)
    jobs.becomes(name(run, "train", 2), JobState("FAILED", "InternalServerError"))
    assert go_on(run, jobs) is None, "two restarts: a crash and a loss"
    assert "restart 2 of 2" in status(run, launchers).stages[3].restarts


def test_lost_instances_are_replaced_as_often_as_restarts_are_allowed(run: Run, jobs: Jobs) -> None:
    finish(run, ["env", "download", "dataset"])
    launchers = submitted(run)
    for number in (1, 2, 3):
        jobs.becomes(name(run, "train", number), JobState("FAILED", "InternalServerError: We encountered an error"))
        go_on(run, jobs)
    assert jobs.created == ["train-1", "train-2", "train-3"]
    current = status(run, launchers)
    assert current.failed is not None
    assert "InternalServerError" in current.failed.detail
    submit.submit(run, launchers, Selection(), "sagemaker")
    jobs.becomes(name(run, "train", 4), JobState("TIMEOUT"))
    assert go_on(run, jobs) == name(run, "train", 5), "another submission has its own restarts"


@pytest.mark.parametrize(
    ("state", "began", "exit_status"),
    [
        (JobState("FAILED", "exit status 1"), True, "1"),
        (JobState("FAILED", "AlgorithmError: env: cannot import torch, exit code: 1"), True, ""),
        (JobState("FAILED", "no value"), True, "2"),
        (JobState("FAILED", "rank 0: SIGTERM at step 3"), True, "143"),
        (JobState("CANCELLED"), True, ""),
        (JobState("CANCELLED"), True, "143"),
        (JobState("DEADLINE", "no spot instances"), True, ""),
        (JobState("FAILED", "CapacityError: Unable to provision requested ML compute capacity"), False, ""),
    ],
)
def test_what_no_other_job_would_cure_is_not_continued(
    run: Run, jobs: Jobs, state: JobState, began: bool, exit_status: str
) -> None:
    finish(run, ["env", "download", "dataset"])
    launchers = submitted(run)
    jobs.becomes(name(run, "train"), state, began)
    if exit_status:
        publish.write_text(run.exit_marker("train", name(run, "train")), f"{exit_status}\n")
    current = status(run, launchers, advance=True)
    assert jobs.created == ["train-1"]
    assert shown(current)["train"] == ("cancelled" if state.state == "CANCELLED" else "failed")
    assert shown(current)["merge"] in ("cancelled", "not run"), "it does not wait for ever"
    if not began:
        assert "CapacityError" in current.stages[3].detail


def test_killed_at_the_limit_it_is_continued(run: Run, jobs: Jobs) -> None:
    finish(run, ["env", "download", "dataset"])
    submitted(run)
    jobs.becomes(name(run, "train"), JobState("TIMEOUT"))
    publish.write_text(run.exit_marker("train", name(run, "train")), f"{128 + signal.SIGTERM}\n")
    assert go_on(run, jobs) == name(run, "train", 2)


def test_stages_on_cpus_are_not_repeated(run: Run, jobs: Jobs) -> None:
    submitted(run)
    jobs.becomes(name(run, "prepare"), JobState("FAILED", "InternalServerError"))
    assert go_on(run, jobs) is None


def test_cancel_stops_the_job_and_those_that_wait(run: Run, jobs: Jobs) -> None:
    launchers = submitted(run)
    jobs.becomes(name(run, "prepare"), RUNNING)
    cancelled = submit.cancel(run, launchers)
    assert {job.stage for job in cancelled} == {stage.name for stage in run.plan.stages}
    assert jobs.stopped == [name(run, "prepare")]
    finish(run, ["env", "download", "dataset"])  # it was about to end
    assert go_on(run, jobs, leaving=name(run, "prepare")) is None
    assert shown(status(run, launchers))["train"] == "cancelled"
    submit.submit(run, launchers, Selection(), "sagemaker")
    assert jobs.created == ["prepare-1", "train-2"]


@pytest.mark.parametrize("moment", ["before it is created", "after `cancel` looked for jobs"])
def test_cancel_stops_a_job_that_is_created_meanwhile(
    run: Run, jobs: Jobs, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The container of a training that is continued looks for marks, and `cancel` comes before it creates the job."""
    launchers = submitted(run)
    finish(run, ["env", "download", "dataset"])
    assert go_on(run, jobs) == name(run, "train")
    jobs.becomes(name(run, "train"), RUNNING)
    left_to_be_continued(run, name(run, "train"))
    if moment == "before it is created":
        jobs.before_create = lambda: submit.cancel(run, launchers)
        assert go_on(run, jobs, leaving=name(run, "train")) is None
    else:

        def stop(stopped: str) -> None:
            jobs.becomes(stopped, JobState("CANCELLED"))
            with monkeypatch.context() as patch:
                patch.setattr(advance_module, "_is_cancelled", lambda *_: False)
                go_on(run, jobs, leaving=stopped)

        monkeypatch.setattr(jobs, "stop", stop)
        submit.cancel(run, launchers)
        assert jobs.created[-1] == "train-2"
    assert jobs.found[name(run, "train", 2)].state.state == "CANCELLED"
    assert go_on(run, jobs) is None


def test_a_refused_job_leaves_nothing_that_waits(run: Run, jobs: Jobs) -> None:
    jobs.refuse = "ResourceLimitExceeded"
    with pytest.raises(UserError, match="ResourceLimitExceeded"):
        submitted(run)
    jobs.refuse = ""
    launchers = submitted(run)
    assert jobs.created == ["prepare-2"]
    # later, when the records are there, and nobody watches
    finish(run, ["env", "download", "dataset"])
    jobs.refuse = "ResourceLimitExceeded"
    current = status(run, launchers, advance=True)
    assert "ResourceLimitExceeded" in current.note
    assert shown(current)["train"] == "pending"
    jobs.refuse = ""
    status(run, launchers, advance=True)
    assert jobs.created == ["prepare-2", "train-2"]


def test_a_second_submission_waits_for_the_first(run: Run, jobs: Jobs) -> None:
    launchers = submitted(run)
    with pytest.raises(UserError, match="still at work"):
        submit.submit(run, launchers, Selection(), "sagemaker")


def test_a_job_that_a_killed_submission_left_unrecorded_is_found(run: Run, jobs: Jobs) -> None:
    launchers = submitted(run)
    run.jobs_path.unlink()
    assert {job.job_id for job in launchers.active(run, also="sagemaker")} == {name(run, "prepare")}
    assert {job.stage for job in run.jobs()} == {"env", "download", "dataset"}


def test_what_the_service_would_refuse_is_refused_before_anything_is_recorded(
    make_run: Callable[..., Run], jobs: Jobs
) -> None:
    run = make_run(sagemaker=FSX | {"cpu_instance_type": "x99.huge"}, cluster__instance_type="c7i.4xlarge")
    with pytest.raises(UserError, match=r"x99\.huge"):
        submitted(run)
    assert (run.jobs(), jobs.created) == ([], [])


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
    finish(run, ["env", "download", "dataset"])
    submitted(run)
    assert [job.stage for job in run.jobs()] == ["train", "consolidate", "merge", "generate"]
    submit.cancel(run, Launchers())
    slurm = Recording()
    submit.submit(run, Launchers(slurm=slurm), Selection(), "slurm")  # type: ignore[arg-type]
    assert slurm.stages[:2] == ["env", "train"]


@dataclass
class Recording:
    """A launcher that only notes what is submitted."""

    name: str = "slurm"
    shares_environment: bool = True
    stages: list[str] = field(default_factory=list)

    def submit(self, run: Run, stages: Iterable[Any], submitted: Callable[..., None]) -> None:
        self.stages += [stage.name for stage in stages]

    def active(self, run: Run, jobs: object) -> list[Any]:
        return []


def test_states_say_what_a_job_waits_for(run: Run, jobs: Jobs) -> None:
    submitted(run)
    found = states(run, as_jobs(jobs))
    assert found[name(run, "train")] == JobState("PENDING", f"after {name(run, 'prepare')}")
    jobs.becomes(name(run, "prepare"), JobState("FAILED"))
    found = states(run, as_jobs(jobs))
    assert not any(state.active for state in found.values())


def test_the_code_of_a_run_is_that_of_its_submission(run: Run, jobs: Jobs) -> None:
    submitted(run)
    assert {job["code"] for job in json.loads(run.jobs_path.read_text())} == {"0.1.0-abc"}
    (channel, _) = jobs.requests[0]["InputDataConfig"]
    assert channel["DataSource"]["FileSystemDataSource"]["DirectoryPath"] == "/abcdefgh/hyperpod-ft/code/0.1.0-abc"


def test_another_launcher_runs_what_only_the_store_has(run: Run, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its jobs read the outputs on their own volume."""
    chosen: list[str] = []

    def noted(_: ProcessLauncher, __: Run, stages: Sequence[StagePlan], ___: object) -> None:
        chosen.extend(stage.name for stage in stages)

    monkeypatch.setattr(ProcessLauncher, "submit", noted)
    submitted(run)
    jobs.becomes(name(run, "prepare"), JobState("FAILED"))
    output, fingerprint = Output("models/a", 3, ""), run.plan["download"].fingerprint
    record = Record("download", fingerprint, {}, (output,), {}, "2026-01-01T00:00:00Z", 1.0, "algo-1", "x")
    record.write(run.record_path("download"))
    publish.write_json(run.store_listing, {output.path: output.size})
    assert run.is_done("download")
    submit.submit(run, Launchers(), Selection(), "process")
    assert "download" in chosen
