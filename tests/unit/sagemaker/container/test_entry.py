"""What a container does with the stages of its job. The stages' scripts are lines of bash, their records are files."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from hyperpod_ft.errors import UserError
from hyperpod_ft.job.job_host import TrainingJobHost, this_host
from hyperpod_ft.sagemaker.container import entry, messages
from hyperpod_ft.sagemaker.container.host import ContainerHost, Hyperparameters
from hyperpod_ft.sagemaker.container.script import Stop


class Commands:
    """In place of the kit's own programs: a stage is done when its script has left a file of its name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.calls: list[str] = []
        self.refuses = ""  # a stage whose outputs cannot be pushed
        self.lacks = ""  # a stage whose needs cannot be pulled
        self.used: float | None = 0  # seconds of the job's limit
        self.pushed: dict[str, str] = {}  # exit statuses, by the names of their files

    def before(self, stage: str) -> None:
        if stage == self.lacks:
            raise UserError("store s3://bucket: access denied to s3:GetObject")
        self.calls.append(f"before {stage}")

    @contextmanager
    def during(self, stage: str) -> Iterator[None]:
        yield

    def after(self, stage: str) -> None:
        if stage == self.refuses:
            raise UserError("store s3://bucket: access denied to s3:PutObject")
        self.calls.append(f"after {stage}")

    def push_state(self) -> None:
        self.calls.append("state")
        self.pushed = {marker.name: marker.read_text().strip() for marker in self.directory.glob("exits/*")}

    def is_done(self, stage: str) -> bool:
        return (self.directory / stage).exists()

    def seconds_used(self) -> float | None:
        return self.used

    def advance(self) -> None:
        self.calls.append("advance")


@pytest.fixture
def stop() -> Iterator[Stop]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)}
    yield Stop(600)
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def reasons(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was left for SageMaker's FailureReason."""
    found: list[str] = []
    monkeypatch.setattr(entry, "write_failure_reason", found.append)
    return found


def host(directory: Path, **scripts: str) -> ContainerHost:
    (directory / "sbatch").mkdir(parents=True)
    for stage, text in scripts.items():
        (directory / "sbatch" / f"{stage}.sbatch").write_text(f"cd {directory}; {text}")
    (directory / "env").touch()
    parameters = Hyperparameters(
        "quick-1", "prepare", " ".join(scripts), str(directory.parent), str(directory), "600", python=sys.executable
    )
    return ContainerHost(("algo-1",), 0, "eth0", parameters)


def test_an_error_after_the_record_is_no_failure(tmp_path: Path, stop: Stop, reasons: list[str]) -> None:
    """CUDA's error at exit, after a good run."""
    commands = Commands(tmp_path)
    assert entry.run_as_first(host(tmp_path, generate="touch generate; exit 139"), commands, stop) == 0  # type: ignore[arg-type]
    assert reasons == [] and commands.calls[-1] == "advance"


@pytest.mark.parametrize(
    ("script", "status", "reason"),
    [
        (
            "echo 'error: download: model.source: not found; correct it'; exit 2",
            2,
            "download: model.source: not found;",
        ),
        ("echo 'ValueError: bug'; exit 1", 1, "download: exit status 1: ValueError: bug"),
        ("echo done; exit 0", 1, "download: exit status 0: done"),  # believed only with its record
    ],
)
def test_a_stage_without_a_record_ends_the_job(
    tmp_path: Path, stop: Stop, reasons: list[str], script: str, status: int, reason: str
) -> None:
    commands = Commands(tmp_path)
    assert entry.run_as_first(host(tmp_path, download=script, dataset="touch dataset"), commands, stop) == status  # type: ignore[arg-type]
    assert len(reasons) == 1 and reasons[0].startswith(reason)
    assert not (tmp_path / "dataset").exists()


def test_what_cannot_be_pushed_is_not_done(tmp_path: Path, stop: Stop) -> None:
    commands = Commands(tmp_path)
    commands.refuses = "download"
    with pytest.raises(UserError, match="PutObject"):
        entry.run_as_first(host(tmp_path, download="touch download"), commands, stop)  # type: ignore[arg-type]
    assert "advance" not in commands.calls
    assert commands.pushed == {"download_quick-1": "1"}


def test_what_cannot_be_pulled_is_a_failure_of_the_stage(tmp_path: Path, stop: Stop) -> None:
    commands = Commands(tmp_path)
    commands.lacks = "dataset"
    with pytest.raises(UserError, match="GetObject"):
        entry.run_as_first(host(tmp_path, download="touch download", dataset="touch dataset"), commands, stop)  # type: ignore[arg-type]
    assert commands.pushed == {"dataset_quick-1": "1"} and "advance" not in commands.calls


def test_a_failure_of_the_container_s_own_environment_is_one_of_its_stage(
    tmp_path: Path, stop: Stop, reasons: list[str]
) -> None:
    """Otherwise the job would be taken for one that lost its instances, and repeated."""
    commands = Commands(tmp_path)
    job = host(tmp_path, train="touch train")
    (tmp_path / "env").unlink()
    (tmp_path / "sbatch" / "env.sbatch").write_text("echo 'error: env: cannot import torch'; exit 2")
    assert entry.run_as_first(job, commands, stop) == 2  # type: ignore[arg-type]
    assert commands.pushed == {"train_quick-1": "2"} and reasons == ["env: cannot import torch"]
    assert commands.calls == ["before env", "state"], "no other job is created"


@pytest.mark.parametrize("stage", ["precompile", "generate"])
def test_the_exit_status_of_every_stage_is_pushed(tmp_path: Path, stop: Stop, reasons: list[str], stage: str) -> None:
    commands = Commands(tmp_path)
    job = host(tmp_path, **{stage: f"mkdir exits; echo 1 >exits/{stage}_quick-1; exit 1"})
    assert entry.run_as_first(job, commands, stop) == 1  # type: ignore[arg-type]
    assert commands.pushed == {f"{stage}_quick-1": "1"}
    assert commands.calls[-1] == "state" and len(reasons) == 1


@pytest.mark.parametrize(("status", "calls"), [(138, ["state", "advance"]), (137, ["before train", "state"])])
def test_another_job_may_continue_one_whose_time_is_over(
    tmp_path: Path, stop: Stop, reasons: list[str], status: int, calls: list[str]
) -> None:
    commands = Commands(tmp_path)
    assert entry.run_as_first(host(tmp_path, train=f"exit {status}"), commands, stop) == status  # type: ignore[arg-type]
    assert commands.calls[-2:] == calls and len(reasons) == 1


def test_a_container_without_an_interpreter_fails_its_first_stage(tmp_path: Path) -> None:
    commands = Commands(tmp_path)
    job = host(tmp_path, train="touch train")
    with pytest.raises(UserError, match=r"env\.python: no /nowhere/python in this image"):
        entry.prepare(job, commands, Path("/nowhere/python"))  # type: ignore[arg-type]
    assert commands.pushed == {"train_quick-1": "1"}


def test_a_host_that_never_came_ends_with_the_job(
    tmp_path: Path, stop: Stop, reasons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the first host fails, SageMaker ends the other one, which would wait until the job's time is over."""
    monkeypatch.setattr(messages, "JOIN_SECONDS", 0.2)
    commands = Commands(tmp_path)
    job = replace(host(tmp_path, train="touch train"), hosts=("algo-1", "algo-2"))
    assert entry.run_as_first(job, commands, stop) == 1  # type: ignore[arg-type]
    assert commands.calls[-1] == "advance"
    (reason,) = reasons
    assert "1 of the other hosts" in reason


def test_a_stopped_job_starts_nothing_more(tmp_path: Path, stop: Stop) -> None:
    """It was cancelled, or SageMaker will start it again."""
    commands = Commands(tmp_path)
    signal.raise_signal(signal.SIGTERM)
    assert entry.run_as_first(host(tmp_path, download="touch download"), commands, stop) == 143  # type: ignore[arg-type]
    assert commands.calls == ["state"]


def test_training_does_not_begin_when_its_time_is_almost_over(tmp_path: Path, stop: Stop) -> None:
    commands = Commands(tmp_path)
    signal.raise_signal(signal.SIGALRM)
    job = host(tmp_path, precompile="touch precompile", train="touch train")
    assert entry.run_as_first(job, commands, stop) == 138  # type: ignore[arg-type]
    assert commands.calls == ["before precompile", "after precompile", "state", "advance"], "another job trains"


def test_the_region_is_that_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SageMaker does not document that it sets AWS_REGION, which boto3 needs; one that is set stays."""
    job = host(tmp_path)
    monkeypatch.setenv("TRAINING_JOB_ARN", "arn:aws:sagemaker:eu-central-1:123456789012:training-job/quick-1")
    monkeypatch.delenv("AWS_REGION", raising=False)
    assert entry.variables(job, Path(sys.executable))["AWS_REGION"] == "eu-central-1"
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    assert "AWS_REGION" not in entry.variables(job, Path(sys.executable))
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("TRAINING_JOB_ARN")
    assert "AWS_REGION" not in entry.variables(job, Path(sys.executable))


def test_a_container_has_what_earlier_ones_have_left(
    tmp_path: Path, stop: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the job's limit, 600 s; if that cannot be asked, it has all of it."""
    commands = Commands(tmp_path)
    for used, left, notice in ((None, "600", 480), (500.2, "100", 80), (700.0, "1", 0)):
        monkeypatch.setenv("HYPERPOD_FT_MAX_RUNTIME", "600")
        stop.notice_in(480)
        commands.used = used
        entry.count_earlier_containers(host(tmp_path / left), commands, stop)  # type: ignore[arg-type]
        assert os.environ["HYPERPOD_FT_MAX_RUNTIME"] == left
        assert notice - 5 < signal.getitimer(signal.ITIMER_REAL)[0] <= notice + 1


def test_the_notice_comes_well_before_the_limit() -> None:
    assert entry.notice_after(8 * 3600) == 8 * 3600 - 900
    assert entry.notice_after(1000) == 800


def test_the_supervisor_waits_for_the_checkpoint_as_long_as_the_notice_allows(tmp_path: Path) -> None:
    """Most of SageMaker's 15 minutes, or of Slurm's five."""
    node = this_host(entry.variables(host(tmp_path), Path(sys.executable)))
    assert isinstance(node, TrainingJobHost) and node.max_runtime == 600
    command = node.on_every_host(["bash"], "train", "/fsx/run")
    assert command[1:] == ["-m", "hyperpod_ft.sagemaker.container.on_every_host", "train", "/fsx/run", "bash"]
    limits = [replace(node, max_runtime=seconds).seconds_to_save(300) for seconds in (600, 8 * 3600)]
    assert limits == [80, 600] and this_host({"SLURM_JOB_ID": "7"}).seconds_to_save(300) == 240
