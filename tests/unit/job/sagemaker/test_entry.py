"""What a container does with the stages of its job. The stages' scripts are lines of bash, their records are files."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hyperpod_ft.job.sagemaker import entry
from hyperpod_ft.job.sagemaker.place import JobError, Place
from hyperpod_ft.job.sagemaker.script import Stop


class Kit:
    """In place of the kit's own programs: a stage is done when its script has left a file of its name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.calls: list[str] = []
        self.refuses = ""  # a stage whose outputs cannot be pushed

    def before(self, stage: str) -> None:
        self.calls.append(f"before {stage}")

    @contextmanager
    def during(self, stage: str) -> Iterator[None]:
        yield

    def after(self, stage: str) -> None:
        if stage == self.refuses:
            raise JobError("store s3://bucket: access denied to s3:PutObject")
        self.calls.append(f"after {stage}")

    def is_done(self, stage: str) -> bool:
        return (self.directory / stage).exists()

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
    monkeypatch.setattr(entry, "report_failure", found.append)
    return found


def place(directory: Path, **scripts: str) -> Place:
    (directory / "sbatch").mkdir(parents=True)
    for stage, text in scripts.items():
        (directory / "sbatch" / f"{stage}.sbatch").write_text(f"cd {directory}; {text}")
    (directory / "env").touch()
    hyperparameters = {"job": "quick-1", "stages": " ".join(scripts), "run_directory": str(directory)}
    return Place(("algo-1",), 0, "eth0", hyperparameters)


def test_stages_run_in_order_and_the_next_job_is_created(tmp_path: Path, stop: Stop, reasons: list[str]) -> None:
    kit = Kit(tmp_path)
    job = place(tmp_path, download="touch download", dataset="[[ -e download ]] && touch dataset")
    assert entry.lead(job, kit, stop) == 0  # type: ignore[arg-type]
    assert kit.calls == ["before download", "after download", "before dataset", "after dataset", "advance"]
    assert reasons == []


def test_an_error_after_the_record_is_no_failure(tmp_path: Path, stop: Stop, reasons: list[str]) -> None:
    """CUDA's error at exit, after a good run."""
    kit = Kit(tmp_path)
    assert entry.lead(place(tmp_path, generate="touch generate; exit 139"), kit, stop) == 0  # type: ignore[arg-type]
    assert reasons == [] and kit.calls[-1] == "advance"


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
    kit = Kit(tmp_path)
    assert entry.lead(place(tmp_path, download=script, dataset="touch dataset"), kit, stop) == status  # type: ignore[arg-type]
    assert len(reasons) == 1 and reasons[0].startswith(reason)
    assert not (tmp_path / "dataset").exists()


def test_what_cannot_be_pushed_is_not_done(tmp_path: Path, stop: Stop) -> None:
    kit = Kit(tmp_path)
    kit.refuses = "download"
    with pytest.raises(JobError, match="PutObject"):
        entry.lead(place(tmp_path, download="touch download"), kit, stop)  # type: ignore[arg-type]
    assert "advance" not in kit.calls


def test_a_stopped_job_starts_nothing_more(tmp_path: Path, stop: Stop) -> None:
    """It was cancelled, or SageMaker will start it again."""
    kit = Kit(tmp_path)
    signal.raise_signal(signal.SIGTERM)
    assert entry.lead(place(tmp_path, download="touch download"), kit, stop) == 143  # type: ignore[arg-type]
    assert kit.calls == []


def test_training_does_not_begin_when_its_time_is_almost_over(tmp_path: Path, stop: Stop) -> None:
    kit = Kit(tmp_path)
    signal.raise_signal(signal.SIGALRM)
    job = place(tmp_path, precompile="touch precompile", train="touch train")
    assert entry.lead(job, kit, stop) == 143  # type: ignore[arg-type]
    assert kit.calls == ["before precompile", "after precompile", "advance"], "another job trains"


def test_a_container_checks_its_own_environment(tmp_path: Path, stop: Stop) -> None:
    """With a store: the record of another machine's environment says nothing about this one."""
    kit = Kit(tmp_path)
    job = place(tmp_path, train="[[ -e env ]] && touch train")
    (tmp_path / "env").unlink()
    (tmp_path / "sbatch" / "env.sbatch").write_text(f"touch {tmp_path}/env")
    assert entry.lead(job, kit, stop) == 0  # type: ignore[arg-type]
    assert kit.calls == ["before env", "before train", "after train", "advance"], "nothing of it is pushed"


def test_the_notice_comes_well_before_the_limit() -> None:
    assert entry.notice_after(8 * 3600) == 8 * 3600 - 900
    assert entry.notice_after(1000) == 800
