"""What the client knows of a run in a store: records and sizes of outputs that it does not have. S3 is moto's."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hyperpod_ft import publish
from hyperpod_ft.aws.s3 import objects
from hyperpod_ft.aws.session import Session
from hyperpod_ft.config import run_file
from hyperpod_ft.download import assets
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker.store import run_store
from hyperpod_ft.sagemaker.store.run_store import RunStore
from hyperpod_ft.sagemaker.store.sync import RunSync, sync_of
from hyperpod_ft.stages import download
from hyperpod_ft.stages.stage import perform
from tests.aws.conftest import REGION, Aws
from tests.aws.kit import ROOT
from tests.conftest import run_file_values
from tests.unit import stage_runs
from tests.unit.stage_runs import tree

STORE = {"region": REGION, "role": "arn:aws:iam::123456789012:role/ft", "store": "s3://place/ft"}


@pytest.fixture
def machine(aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[Run, RunSync]]:
    """The same run on a machine of its own: another root, the same store."""
    aws.client("s3").create_bucket(Bucket="place", CreateBucketConfiguration={"LocationConstraint": REGION})
    monkeypatch.setattr(run_store, "snapshot", lambda copies: copies)  # the kit's own copy has hundreds of files

    def make(name: str, **changes: Any) -> tuple[Run, RunSync]:
        values = run_file_values(tmp_path / name, sagemaker=STORE, cluster__instance_type="c7i.xlarge", **changes)
        run = Run.of(run_file.resolve(run_file.validate(values, "run.yaml"), tmp_path))
        run.freeze()
        return run, sync_of(run, Session(REGION))

    return make


def finish(run: Run, stage: str, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(f"output of {stage}")
    stage_runs.finish(run, stage, output)


def test_a_stage_is_done_where_the_store_has_its_outputs(
    machine: Callable[[str], tuple[Run, RunSync]], aws: Aws
) -> None:
    (container, there), (client, here) = machine("container"), machine("client")
    finish(container, "merge", container.paths.tuned_model / "model.safetensors")
    finish(container, "download", container.paths.base_model / "config.json")
    there.prepare()
    assert client.journal.why_not_done("merge") == "has not run"
    here.refresh()
    assert client.journal.is_done("merge")
    assert client.journal.is_done("download"), "its record is shared among runs"
    assert not client.paths.tuned_model.exists()
    client.journal.add_job(Job("merge", "x-finish-1", "sagemaker", "2026-01-01T00:00:00Z"))
    model = f"ft/runs/test/{client.plan.run_id}/merged"
    assert Launchers().location(client, client.paths.tuned_model) == f"s3://place/{model}"
    aws.client("s3").put_object(Bucket="place", Key=f"{model}/model.safetensors", Body=b"another size")
    here.refresh()
    assert "has 12 bytes, was 15" in client.journal.why_not_done("merge")
    aws.client("s3").delete_object(Bucket="place", Key=f"{model}/model.safetensors")
    here.refresh()
    assert "no longer exists" in client.journal.why_not_done("merge")


def test_what_is_done_here_is_pushed_once(machine: Callable[[str], tuple[Run, RunSync]], aws: Aws) -> None:
    """Such as a download with a token of the Hub, which containers do not get."""
    client, here = machine("client")
    here.refresh()
    finish(client, "download", client.paths.base_model / "config.json")
    finish(client, "env", client.paths.environment_path / "pyvenv.cfg")
    here.prepare()
    here.refresh()
    assert not any("envs/" in name for name in client.journal.sizes_in_store()), "each container makes its own"
    (client.paths.base_model / "config.json").unlink()
    assert client.journal.is_done("download")
    before = len([call for call in aws.requests() if call == ("s3", "PUT")])
    here.prepare()
    assert len([call for call in aws.requests() if call == ("s3", "PUT")]) == before


def test_scripts_that_another_machine_has_pushed_are_not_taken_for_these(
    machine: Callable[[str], tuple[Run, RunSync]],
) -> None:
    (one, here), (two, there) = machine("one"), machine("two")
    for run, limit in ((one, "01:00:00"), (two, "02:00:00")):
        publish.write_text(run.paths.script("train"), f"#SBATCH --time={limit}\n")
    here.prepare()
    assert here.has_run_files() and not there.has_run_files()
    there.prepare()
    assert there.has_run_files() and not here.has_run_files()


def test_sources_of_this_machine_reach_stage_download(
    machine: Callable[..., tuple[Run, RunSync]], aws: Aws, tmp_path: Path
) -> None:
    """In a container, which has neither."""
    model = shutil.copytree(ROOT / "examples/quickstart/tiny-llama", tmp_path / "model")
    rows = shutil.copyfile(ROOT / "examples/quickstart/qa.jsonl", tmp_path / "rows.jsonl")
    local = {"model": {"source": str(model)}, "dataset": {"source": str(rows), "format": "dolly"}}
    (container, _), (client, here) = machine("container", **local), machine("client", **local)
    assets.copy_local_sources(client)
    here.prepare()
    shutil.rmtree(model)
    rows.unlink()
    RunStore(container, aws.client("s3")).pull_needs("download")
    perform(container, "download", download.work)
    assert tree(container.paths.base_model) == tree(client.paths.base_model)
    assert tree(container.paths.raw_datasets[0]) == tree(client.paths.raw_datasets[0])


def test_discarding_removes_records_but_not_those_of_a_training(machine: Callable[[str], tuple[Run, RunSync]]) -> None:
    client, here = machine("client")
    for stage, output in {"train": client.paths.metrics_path, "merge": client.paths.tuned_model / "file"}.items():
        finish(client, stage, output)
    here.prepare()
    with pytest.raises(UserError, match=r"--force: stage train.*s3://place/ft/runs/.*/checkpoints"):
        here.discard(["train", "merge"])
    here.refresh()
    assert client.journal.is_done("merge"), "nothing was removed"
    here.discard(["consolidate", "merge"])
    client.paths.record_path("merge").unlink()
    here.refresh()
    assert not client.journal.is_done("merge")
    assert client.journal.is_done("train")


def test_what_is_pushed_reaches_the_others(machine: Callable[[str], tuple[Run, RunSync]]) -> None:
    (container, there), (client, here) = machine("container"), machine("client")
    here.prepare()
    client.journal.add_job(
        Job(
            "train",
            "x-train-1",
            "sagemaker",
            "2026-01-01T00:00:00Z",
            code="hyperpod-ft-0.1.0-0123456789abcdef0123456789abcdef",
        )
    )
    client.paths.cancel_marker("train", "x-train-1").parent.mkdir(parents=True)
    client.paths.cancel_marker("train", "x-train-1").touch()
    here.push([client.paths.jobs_path, client.paths.cancel_marker("train", "x-train-1")])
    there.refresh()
    assert container.journal.jobs() == client.journal.jobs()
    assert container.paths.cancel_marker("train", "x-train-1").exists()


def test_an_object_that_may_not_be_removed_is_one_line() -> None:
    """S3 answers such a request with status 200."""
    refused = {"Errors": [{"Key": "store/a", "Code": "AccessDenied"}]}
    client = SimpleNamespace(delete_objects=lambda **_: refused)
    with pytest.raises(UserError, match=r"s3://place/store/a \(AccessDenied\); grant .*s3:DeleteObject"):
        objects.remove(client, "s3://place/store", ["a"])
