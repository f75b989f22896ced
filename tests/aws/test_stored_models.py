"""`ask` and `serve` of a run of training jobs, whose models are in a store in S3, on the stand-in for AWS."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hyperpod_ft.digests import files_below
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker.section import SAGEMAKER
from hyperpod_ft.serving import models
from tests.aws.conftest import REGION, Aws
from tests.aws.endpoint_run import BUCKET, make_run, only_in_store
from tests.aws.kit import ROOT
from tests.unit.stage_runs import finish


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = make_run(tmp_path_factory.mktemp("stored"))
    finish(run, "download", run.paths.base_model, digests=False)
    return run


@pytest.fixture
def laptop(aws: Aws, finished: Run, tmp_path: Path) -> Run:
    """The run as it is where it was submitted: some of its jobs have ended since the last look."""
    s3 = aws.client("s3")
    s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
    run = only_in_store(finished, tmp_path / "laptop", s3)
    run.paths.record_path("merge").unlink()
    run.paths.store_listing.write_text("{}")
    for stage in ("merge", "generate"):  # of which the second has not ended
        run.journal.add_job(Job(stage, "tiny-llama-finish-1", SAGEMAKER, utc_now()))
    for stage in ("download", "consolidate", "merge"):
        record = finished.journal.record(stage)
        assert record is not None
        paths = [finished.paths.record_path(stage), *(finished.paths.root / output.path for output in record.outputs)]
        for path in paths:
            s3.upload_file(str(path), BUCKET, f"store/{path.relative_to(finished.paths.root).as_posix()}")
    return run


def ask(run: Run, aws: Aws, home: Path) -> "subprocess.CompletedProcess[str]":
    environment = {**aws.environment, "HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "hyperpod_ft",
        "ask",
        str(run.paths.directory),
        "Which command submits a batch script?",
    ]
    return subprocess.run(
        command,
        check=False,
        cwd=home,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_question_to_a_run_in_a_store(laptop: Run, aws: Aws, tmp_path: Path) -> None:
    """It has no environment on this machine either."""
    asked = ask(laptop, aws, tmp_path)
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.strip()
    assert re.search(rf"[0-9.]+ [kM]B, from s3://{BUCKET}/store to {laptop.paths.root}", asked.stderr)
    assert not laptop.paths.base_model.exists(), "it was not asked"
    before = aws.requests()
    models.find(str(laptop.paths.directory), Launchers(), base=False)
    assert aws.requests() == before, "what is here is asked without AWS"


def test_what_an_interrupted_pull_left_is_pulled(
    laptop: Run, finished: Run, aws: Aws, capfd: pytest.CaptureFixture[str]
) -> None:
    found = models.find(str(laptop.paths.directory), Launchers(), base=True)
    assert list(found.directories) == ["tuned", "base"]
    for mine, original in (
        (laptop.paths.tuned_model, finished.paths.tuned_model),
        (laptop.paths.base_model, finished.paths.base_model),
        (laptop.paths.adapter, finished.paths.adapter),
    ):
        assert contents(mine) == contents(original)
    (laptop.paths.base_model / "model.safetensors").unlink()
    capfd.readouterr()
    models.find(str(laptop.paths.directory), Launchers(), base=True)
    assert "pulling 1 files" in capfd.readouterr().err
    assert contents(laptop.paths.base_model) == contents(finished.paths.base_model)


def test_there_is_no_model_yet(laptop: Run, aws: Aws) -> None:
    aws.client("s3").delete_object(
        Bucket=BUCKET, Key=f"store/{laptop.paths.record_path('merge').relative_to(laptop.paths.root)}"
    )
    with pytest.raises(UserError, match="no tuned model yet: stage merge"):
        models.find(str(laptop.paths.directory), Launchers())


def contents(directory: Path) -> dict[str, bytes]:
    return {file.relative_to(directory).as_posix(): file.read_bytes() for file in files_below(directory)}
