"""Downloads from S3, against moto's server over HTTP."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from hyperpod_ft.cli.main import app
from hyperpod_ft.cli.submitting import submit_and_follow
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import Selection
from hyperpod_ft.stages import download as stage
from hyperpod_ft.stages.stage import perform
from tests.unit.stage_runs import make_run, tree, weights

LARGE = weights(a=os.urandom(1 << 20) * 20)  # several ranges
CONFIG = b'{"model_type": "llama"}'
MODEL = {"config.json": CONFIG, "tokenizer.json": b"{}", "model.safetensors": LARGE}
ROWS = b'{"instruction": "a", "context": "", "response": "b"}\n'


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    started = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    started.start()
    host, port = started.get_host_and_port()
    yield f"http://{host}:{port}"
    started.stop()


@pytest.fixture
def s3(server: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # it remembers another test's credentials
    client, bucket = boto3.client("s3"), boto3.resource("s3").Bucket("models")
    client.create_bucket(Bucket="models")
    for name, content in MODEL.items():
        client.put_object(Bucket="models", Key=f"llama/{name}", Body=content)
    for key in (
        "llama/",
        "llama/pytorch_model.bin",
        "llama-2/config.json",
        "data/train.jsonl",
        "data/b/train-more.jsonl",
    ):
        client.put_object(Bucket="models", Key=key, Body=ROWS if key.startswith("data") else b"")
    yield client
    bucket.objects.delete()
    client.delete_bucket(Bucket="models")


def s3_run(tmp_path: Path, model: str = "s3://models/llama", dataset: str = "s3://models/data/") -> Run:
    return make_run(tmp_path, model, {"source": dataset, "format": "dolly"})


@pytest.mark.usefixtures("s3")
def test_directories_of_objects(tmp_path: Path) -> None:
    run = s3_run(tmp_path)
    perform(run, "download", stage.work)
    found = tree(run.paths.base_model)
    found.pop(".hyperpod-ft.json")
    assert found == MODEL
    assert tree(run.paths.raw_datasets[0]).keys() == {".hyperpod-ft.json", "train.jsonl", "b/train-more.jsonl"}


@pytest.mark.usefixtures("s3")
def test_one_object(tmp_path: Path) -> None:
    run = s3_run(tmp_path, dataset="s3://models/data/train.jsonl")
    perform(run, "download", stage.work)
    assert (run.paths.raw_datasets[0] / "train.jsonl").read_bytes() == ROWS


def test_changed_objects_are_not_taken_for_those_that_were_fetched(
    tmp_path: Path, s3: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """When the run file is submitted again, and by another run that shares the directory. `resume` continues."""
    run = s3_run(tmp_path)
    perform(run, "download", stage.work)
    done = Selection(only="download")
    submit_and_follow(run, Launchers(), "process", done, watch=False, origin="run.yaml")
    s3.put_object(Bucket="models", Key="data/train.jsonl", Body=ROWS.replace(b"a", b"c"))
    changed = r"dataset\.source: .* s3://models/data/ have changed .*; copy them to another prefix"
    with pytest.raises(UserError, match=changed):
        submit_and_follow(run, Launchers(), "process", done, watch=False, origin="run.yaml")
    (tmp_path / "sweep.yaml").write_text(f"{{name: two, run: {run.paths.config_path}, grid: {{seed: [1, 2]}}}}")
    with pytest.raises(UserError, match=changed):
        app(["sweep", str(tmp_path / "sweep.yaml"), "--launcher", "process"], standalone_mode=False)
    submit_and_follow(run, Launchers(), "process", done, watch=False)
    with pytest.raises(UserError, match=changed):
        perform(s3_run(tmp_path, "s3://models/llama/"), "download", stage.work)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    capsys.readouterr()
    submit_and_follow(run, Launchers(), "process", done, watch=False, origin="run.yaml")
    assert "warning: dataset: not compared" in capsys.readouterr().out


def test_complete_files_of_a_killed_attempt_are_kept(
    tmp_path: Path, s3: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = s3_run(tmp_path)
    partial = run.paths.base_model.with_name(f".{run.paths.base_model.name}.partial")
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(LARGE)
    # of the same size, but older than the object, which was replaced since
    (partial / "config.json").write_bytes(b"x" * len(CONFIG))
    os.utime(partial / "config.json", (0, 0))
    (partial / "model.safetensors.6eF7A2b1").write_bytes(b"half")  # boto3's own half file
    kept = (partial / "model.safetensors").stat()
    perform(run, "download", stage.work)
    after = (run.paths.base_model / "model.safetensors").stat()
    assert (after.st_ino, after.st_mtime_ns) == (kept.st_ino, kept.st_mtime_ns)
    assert (run.paths.base_model / "config.json").read_bytes() == CONFIG
    assert tree(run.paths.base_model).keys() == {".hyperpod-ft.json", *MODEL}
    assert "resumes when it is run again" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("s3://models/none", r"model\.source: no objects at s3://models/none; correct the bucket or prefix"),
        (
            "s3://nowhere/llama",
            r"model\.source: cannot read s3://nowhere/llama: .*NoSuchBucket; correct the bucket",
        ),
        ("s3://models/data", r"model\.source: s3://models/data has no safetensors weights"),
    ],
)
@pytest.mark.usefixtures("s3")
def test_errors_are_one_line(tmp_path: Path, model: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        perform(s3_run(tmp_path, model), "download", stage.work)


@pytest.mark.usefixtures("s3")
def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(
        UserError,
        match=r"cannot read s3://models/llama: AWS cannot be reached \(EndpointConnectionError\)",
    ):
        perform(s3_run(tmp_path), "download", stage.work)


def test_without_boto3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    remedy = f"install it: in the kit's clone, {sys.executable} -m pip install -c constraints.txt '.[aws]'"
    with pytest.raises(UserError, match=re.escape(remedy)):
        perform(s3_run(tmp_path), "download", stage.work)


def test_a_key_cannot_leave_the_directory(tmp_path: Path, s3: Any) -> None:
    s3.put_object(Bucket="models", Key="evil/a/../../../escaped.jsonl", Body=ROWS)
    run = s3_run(tmp_path, dataset="s3://models/evil")
    with pytest.raises(UserError, match=r"dataset\.source: the source has a file named 'a/\.\./\.\./\.\./escaped"):
        perform(run, "download", stage.work)
    assert not list(tmp_path.rglob("escaped.jsonl"))
