"""A training job runs the copy of the kit's code that it was created with, and no other."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hyperpod_ft.digests import files_below
from hyperpod_ft.launch import snapshot as snapshots
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker.groups import groups, job_name
from hyperpod_ft.sagemaker.training_request import create_training_job
from tests.aws.training_run import Jobs
from tests.waiting import wait_for

if TYPE_CHECKING:
    from tests.aws.conftest import Aws

_ENTRY = "import sys, hyperpod_ft.part\nprint('the kit runs', len(sys.argv))\n"
_WAITING = "import time\nprint('the kit runs', flush=True)\ntime.sleep(600)\n"
_EVIL = "print('somebody else runs')\n"


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A copy of a small kit."""
    package = tmp_path / "kit" / "hyperpod_ft"
    for name, text in {
        "sagemaker/container/entry.py": getattr(request, "param", _ENTRY),
        "part.py": "",
        "__init__.py": "",
        "templates/a.j2": "a",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    monkeypatch.setattr(snapshots, "PACKAGE", package)
    monkeypatch.setattr(snapshots, "shipped", lambda folder: package / folder)
    monkeypatch.setattr(snapshots, "_sources", snapshots._sources.__wrapped__)
    return snapshots.snapshot(tmp_path / "code")


def start(jobs: Jobs, make_run: Callable[..., Run], copy: Path, changed: dict[str, str]) -> str:
    """The name of a training job with this copy, of which files were changed in the store."""
    run = make_run(sagemaker=jobs.section, cluster__instance_type="c7i.4xlarge")
    contents = {path.relative_to(copy).as_posix(): path.read_text() for path in files_below(copy)} | changed
    for name, text in contents.items():
        jobs.aws.client("s3").put_object(Bucket=jobs.bucket, Key=f"ft/code/{copy.name}/{name}", Body=text.encode())
    (group, *_) = groups(run.plan.stages)
    name = job_name(run, group.name, 1)
    jobs.sagemaker.create_training_job(**create_training_job(run, group, name, copy.name))
    return name


@pytest.mark.parametrize(
    ("changed", "runs"),
    [
        ({}, True),
        ({"hyperpod_ft/__pycache__/part.cpython-311.pyc": _EVIL}, True),
        ({"hyperpod_ft/sagemaker/container/entry.py": _EVIL + _ENTRY}, False),
        ({"hyperpod_ft/part.py": _EVIL}, False),
        ({"hashlib.py": _EVIL}, False),
    ],
    ids=["as it was", "compiled beside it", "its entry", "a module", "a module of Python's name"],
)
def test_a_copy_that_was_changed_in_the_store_is_not_run(
    aws: "Aws", make_run: Callable[..., Run], copy: Path, changed: dict[str, str], runs: bool
) -> None:
    jobs = Jobs(aws)
    name = start(jobs, make_run, copy, changed)
    ended, log = jobs.wait(name), jobs.log(name)
    assert ("the kit runs 1" in log) == runs, json.dumps(ended, default=str) + log
    assert "somebody else runs" not in log
    assert ended["TrainingJobStatus"] == ("Completed" if runs else "Failed")
    assert runs or (copy.name in ended["FailureReason"] and "submit the run again" in ended["FailureReason"])


@pytest.mark.parametrize("copy", [_WAITING], indirect=True, ids=["waits"])
def test_a_job_that_is_stopped_before_the_kit_handles_signals_ends_at_once(
    aws: "Aws", make_run: Callable[..., Run], copy: Path
) -> None:
    """A container that ignored SIGTERM would be killed after two minutes, which are billed."""
    jobs = Jobs(aws)
    name = start(jobs, make_run, copy, {})
    wait_for(lambda: "the kit runs" in jobs.log(name), 300)
    jobs.sagemaker.stop_training_job(TrainingJobName=name)
    began = time.monotonic()
    assert jobs.wait(name)["TrainingJobStatus"] == "Stopped"
    assert time.monotonic() - began < 60
