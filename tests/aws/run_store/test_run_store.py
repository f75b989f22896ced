"""A run's store, on moto's S3: what each stage needs and gives, and kills while it travels."""

import os
import struct
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft import publish
from hyperpod_ft.checkpoint.formats import resumable
from hyperpod_ft.digests import file_xxh3
from hyperpod_ft.errors import UserError
from hyperpod_ft.job.sagemaker import container_commands
from hyperpod_ft.launch.sagemaker.store.run_store import RunStore
from hyperpod_ft.runs.run import Run
from tests.aws.conftest import Aws
from tests.aws.killing import killed
from tests.aws.run_store.stored_runs import CONTENT, below, make_checkpoint, stored, write
from tests.unit.stage_runs import finish, tree


def finish_download(run: Run) -> None:
    write(run.base_model / "model.safetensors", os.urandom(100_000))
    write(run.base_model / ".hyperpod-ft.json", b"{}")
    write(run.raw_dataset / "rows/train.jsonl", b"{}\n")
    finish(run, "download", run.base_model, run.raw_dataset)


def test_a_stage_gives_its_outputs_and_the_next_one_gets_them(client: Any, run: Run, other: Run) -> None:
    finish_download(run)
    finish(run, "env", write(run.environment_path / "pyvenv.cfg", b""))
    for stage in ("env", "download"):
        RunStore(run, client).push_stage(stage)
    RunStore(other, client).pull_needs("dataset")
    assert tree(other.base_model) == tree(run.base_model)
    assert other.is_done("download")
    assert not other.is_done("env")  # each machine makes its own environment
    with pytest.raises(UserError, match=r"dataset-.*\.json: is not a record of this run; run stage dataset first"):
        RunStore(other, client).pull_needs("train")


def test_the_record_comes_last(client: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    finish_download(run)
    put_object, keys = client.put_object, []

    def noted(**arguments: Any) -> Any:
        keys.append(arguments["Key"])
        return put_object(**arguments)

    monkeypatch.setattr(client, "put_object", noted)
    RunStore(run, client).push_stage("download")
    assert len(keys) == 4
    assert keys[-1] == f"store/{below(run, run.record_path('download'))}"


def test_small_files_for_status(client: Any, run: Run, other: Run) -> None:
    RunStore(run, client).push_run()
    write(run.metrics_path, b'{"step": 1}\n')
    write(run.directory / "exits/train_1", b"0")
    write(run.directory / "attempts/usage/a.json", b"{}")
    finish_download(run)
    RunStore(run, client).push_state()
    RunStore(run, client).push_stage("download")
    RunStore(other, client).pull_records()
    assert other.record("download") == run.record("download")
    found = tree(other.directory)
    assert found["metrics.jsonl"] == b'{"step": 1}\n'
    assert {"exits/train_1", "attempts/usage/a.json"} <= found.keys()
    assert not other.base_model.exists()
    code = {
        name for name in stored(client, "code") if name.endswith("/hyperpod_ft/launch/sagemaker/store/run_store.py")
    }
    assert len(code) == 1


def test_metrics_that_are_replaced_while_they_are_read(
    client: Any, run: Run, other: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run.metrics_path, b'{"step": 1}\n')
    RunStore(run, client).push_state()
    get_object, steps = client.get_object, iter((2, 3))

    def replaced(**arguments: Any) -> Any:
        if arguments["Key"].endswith("metrics.jsonl") and (step := next(steps, 0)):
            write(run.metrics_path, b'{"step": %d}\n' % step)
            RunStore(run, client).push_state()
        return get_object(**arguments)

    monkeypatch.setattr(client, "get_object", replaced)
    RunStore(other, client).pull_records()
    assert other.metrics_path.read_bytes() == b'{"step": 3}\n'


def test_a_container_does_not_wait_for_its_disk(
    client: Any, run: Run, other: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which ends with it; small files for `status` are on disk."""
    finish(run, "train", make_checkpoint(run, 4, CONTENT))
    RunStore(run, client).push_stage("train")
    flushed: list[Path] = []
    monkeypatch.setattr(publish, "fsync", flushed.append)
    RunStore(other, client).pull_stage("train")
    RunStore(other, client).pull_checkpoint()
    assert other.is_done("train") and flushed == []
    RunStore(other, client).pull_records()
    assert other.record_path("train") in flushed


def test_shards_are_pushed_while_the_next_is_written(client: Any, run: Run, aws: Aws) -> None:
    merged, names = run.tuned_model, [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    with resumable.resumable_directory(merged, {}) as partial:
        for name in names:
            write(partial / name, name.encode())
        resumable.note(partial, names[0], file_xxh3(partial / names[0]))
        assert RunStore(run, client).push_finished(merged) == names[:1]
        resumable.note(partial, names[1], file_xxh3(partial / names[1]))
    assert {Path(name).name for name in stored(client)} == {names[0]}
    finish(run, "merge", merged)
    sent = aws.requests().count(("s3", "PUT"))
    RunStore(run, client).push_stage("merge")
    assert aws.requests().count(("s3", "PUT")) == sent + 3  # the other shard, the checksums, the record
    assert RunStore(run, client).push_finished(merged) == []


@pytest.mark.parametrize("engine", ["neuron", "torch"])
def test_graphs_of_a_compilation_that_was_killed_are_kept(
    client: Any, run: Run, other: Run, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next container compiles only what is missing. Engine neuron has directories, engine torch files."""
    monkeypatch.setattr(Run, "neuron_cache", property(lambda run: run.root / "neuron-cache/0123"))
    cache, whole = run.neuron_cache, struct.pack("<8xQQ", 1024, 0).ljust(1024, b"\0")
    if engine == "neuron":
        done, half = cache / "neuronxcc-2/MODULE_1+2/model.neff", cache / "neuronxcc-2/MODULE_3+4/model.neff"
        write(done.parent / "model.done", b"")
        write(done.parent / "model.hlo_module.pb.lock", b"")
    else:
        done, half = cache / "ab/cd/abcd1.neff", cache / "ab/cd/abcd2.neff"
    write(done, whole)
    write(half, whole[:-1])
    pushed: set[str] = set()
    container_commands.push_graphs(run, RunStore(run, client), pushed)
    RunStore(other, client).pull_graphs()
    found = set(tree(other.neuron_cache))
    assert found == {file.relative_to(cache).as_posix() for file in (done, done.parent / "model.done") if file.exists()}
    write(half, whole)
    if engine == "neuron":
        write(half.parent / "model.done", b"")
    container_commands.push_graphs(run, RunStore(run, client), pushed)
    RunStore(other, client).pull_graphs()
    assert (other.neuron_cache / half.relative_to(cache)).read_bytes() == whole


@pytest.mark.parametrize("count", range(1, 10, 2))
def test_kills_while_a_stage_is_pushed(client: Any, run: Run, other: Run, count: int) -> None:
    finish_download(run)
    record = below(run, run.record_path("download"))
    if killed(lambda own: RunStore(run, own).push_stage("download"), count) and record not in stored(client):
        with pytest.raises(UserError, match="is not a record of this run"):
            RunStore(other, client).pull_stage("download")
        RunStore(run, client).push_stage("download")
    killed(lambda own: RunStore(other, own).pull_stage("download"), count)
    assert other.record("download") is None or other.is_done("download")
    RunStore(other, client).pull_stage("download")
    assert other.is_done("download")
    assert tree(other.base_model) == tree(run.base_model)
