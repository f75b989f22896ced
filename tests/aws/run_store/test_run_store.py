"""A run's store, on moto's S3: what each stage needs and gives, and kills while it travels."""

import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft import publish
from hyperpod_ft.checkpoint.formats import resumable
from hyperpod_ft.digests import file_xxh3
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.records import Output, Record, utc_now
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import RunPaths
from hyperpod_ft.sagemaker import container_commands
from hyperpod_ft.sagemaker.groups import run_files_digest
from hyperpod_ft.sagemaker.store import run_store
from hyperpod_ft.sagemaker.store.run_store import RunStore
from tests.aws.conftest import Aws
from tests.aws.killing import killed
from tests.aws.run_store.stored_runs import (
    CONTENT,
    ONE_SOURCE,
    STORE,
    below,
    make_checkpoint,
    make_run,
    stored,
    write,
)
from tests.unit.stage_runs import finish, tree


def finish_download(run: Run) -> None:
    write(run.paths.base_model / "model.safetensors", os.urandom(100_000))
    write(run.paths.base_model / ".hyperpod-ft.json", b"{}")
    for directory in run.paths.raw_datasets:
        write(directory / "rows/train.jsonl", b"{}\n")
    finish(run, "download", run.paths.base_model, *run.paths.raw_datasets)


def test_a_stage_gives_its_outputs_and_the_next_one_gets_them(client: Any, run: Run, other: Run) -> None:
    finish_download(run)
    RunStore(run, client).push_stage("download")
    RunStore(other, client).pull_needs("certify")
    assert tree(other.paths.base_model) == tree(run.paths.base_model)
    assert other.journal.is_done("download")
    with pytest.raises(UserError, match=r"certify-.*\.json: is not a record of this run; run stage certify first"):
        RunStore(other, client).pull_needs("train")


def test_every_source_of_the_data_travels(client: Any, tmp_path: Path) -> None:
    sources = [{**ONE_SOURCE, "source": name} for name in ("org/one", "org/two")]
    run, other = (make_run(tmp_path / place, {"sources": sources}) for place in ("here", "there"))
    finish_download(run)
    RunStore(run, client).push_stage("download")
    RunStore(other, client).pull_needs("certify")
    assert len({*other.paths.raw_datasets}) == 2
    for ours, theirs in zip(run.paths.raw_datasets, other.paths.raw_datasets, strict=True):
        assert tree(theirs) == tree(ours) != {}


def test_the_record_comes_last(client: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    finish_download(run)
    put_object, keys = client.put_object, []

    def noted(**arguments: Any) -> Any:
        keys.append(arguments["Key"])
        return put_object(**arguments)

    monkeypatch.setattr(client, "put_object", noted)
    RunStore(run, client).push_stage("download")
    assert len(keys) == 4
    assert keys[-1] == f"store/{below(run, run.paths.record_path('download'))}"


def test_small_files_for_status(client: Any, run: Run, other: Run) -> None:
    RunStore(run, client).push_run()
    write(run.paths.metrics_path, b'{"step": 1}\n')
    write(run.paths.sampled_answers, b"[]")
    write(run.paths.directory / "exits/train_1", b"0")
    write(run.paths.directory / "attempts/usage/a.json", b"{}")
    write(run.paths.report_path, b"<script>")
    client.put_object(Bucket="bucket", Key=f"store/{below(run, run.paths.report_path)}", Body=b"<script>")
    finish_download(run)
    RunStore(run, client).push_state()
    RunStore(run, client).push_stage("download")
    RunStore(other, client).pull_records()
    assert other.journal.record("download") == run.journal.record("download")
    found = tree(other.paths.directory)
    assert found["metrics.jsonl"] == b'{"step": 1}\n' and found["sampled.json"] == b"[]"
    assert {"exits/train_1", "attempts/usage/a.json"} <= found.keys()
    assert not other.paths.base_model.exists()
    assert "report.html" not in found, "a container could write anything to it"
    code = {name for name in stored(client, "code") if name.endswith("/hyperpod_ft/sagemaker/store/run_store.py")}
    assert len(code) == 1


def test_metrics_that_are_replaced_while_they_are_read(
    client: Any, run: Run, other: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run.paths.metrics_path, b'{"step": 1}\n')
    RunStore(run, client).push_state()
    get_object, steps = client.get_object, iter((2, 3))

    def replaced(**arguments: Any) -> Any:
        if arguments["Key"].endswith("metrics.jsonl") and (step := next(steps, 0)):
            write(run.paths.metrics_path, b'{"step": %d}\n' % step)
            RunStore(run, client).push_state()
        return get_object(**arguments)

    monkeypatch.setattr(client, "get_object", replaced)
    RunStore(other, client).pull_records()
    assert other.paths.metrics_path.read_bytes() == b'{"step": 3}\n'


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
    assert other.journal.is_done("train") and flushed == []
    RunStore(other, client).pull_records()
    assert other.paths.record_path("train") in flushed


def test_shards_are_pushed_while_the_next_is_written(client: Any, run: Run, aws: Aws) -> None:
    merged, names = run.paths.tuned_model, [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
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
    monkeypatch.setattr(RunPaths, "neuron_cache", property(lambda run: run.root / "neuron-cache/0123"))
    cache, whole = run.paths.neuron_cache, struct.pack("<8xQQ", 1024, 0).ljust(1024, b"\0")
    if engine == "neuron":
        done, half = cache / "neuronxcc-2/MODULE_1+2/model.neff", cache / "neuronxcc-2/MODULE_3+4/model.neff"
        write(done.parent / "model.done", b"")
        write(done.parent / "model.hlo_module.pb.lock", b"")
    else:
        done, half = cache / "ab/cd/abcd1.neff", cache / "ab/cd/abcd2.neff"
    write(done, whole)
    write(half, whole[:-1])
    pushed: set[str] = set()
    container_commands.push_graphs(run.paths, RunStore(run, client), pushed)
    RunStore(other, client).pull_graphs()
    found = set(tree(other.paths.neuron_cache))
    assert found == {file.relative_to(cache).as_posix() for file in (done, done.parent / "model.done") if file.exists()}
    write(half, whole)
    if engine == "neuron":
        write(half.parent / "model.done", b"")
    container_commands.push_graphs(run.paths, RunStore(run, client), pushed)
    RunStore(other, client).pull_graphs()
    assert (other.paths.neuron_cache / half.relative_to(cache)).read_bytes() == whole


@pytest.mark.parametrize("count", range(1, 10, 2))
def test_kills_while_a_stage_is_pushed(client: Any, run: Run, other: Run, count: int) -> None:
    finish_download(run)
    record = below(run, run.paths.record_path("download"))
    if killed(lambda own: RunStore(run, own).push_stage("download"), count) and record not in stored(client):
        with pytest.raises(UserError, match="is not a record of this run"):
            RunStore(other, client).pull_stage("download")
        RunStore(run, client).push_stage("download")
    killed(lambda own: RunStore(other, own).pull_stage("download"), count)
    assert other.journal.record("download") is None or other.journal.is_done("download")
    RunStore(other, client).pull_stage("download")
    assert other.journal.is_done("download")
    assert tree(other.paths.base_model) == tree(run.paths.base_model)


@pytest.mark.parametrize("changed", ["", "run.yaml", "plan.json", "sbatch/train.sbatch", "sbatch/env.sbatch"])
def test_a_container_uses_no_plan_or_script_that_was_changed_in_the_store(
    aws: Aws, client: Any, run: Run, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_store, "snapshot", lambda copies: copies)  # the kit's own copy has hundreds of files
    monkeypatch.setenv("AWS_REGION", aws.region)
    write(run.paths.script("train"), b"true\n")
    RunStore(run, client).push_run()
    digest = run_files_digest(run.paths.directory)
    if changed:
        name = below(run, run.paths.directory / changed)
        client.put_object(Bucket="bucket", Key=f"store/{name}", Body=b"echo somebody else")
    publish.remove(run.paths.directory)
    if changed:
        with pytest.raises(UserError, match="submit the run again"):
            container_commands.pull_run(run.paths.directory, run.paths.root, STORE, digest)
    else:
        container_commands.pull_run(run.paths.directory, run.paths.root, STORE, digest)
        assert run.paths.script("train").read_bytes() == b"true\n"


@pytest.mark.parametrize(
    "name", ["{run}/json.py", "{run}/sbatch/train.sbatch", "code/copy/entry.py", "envs/x/bin/python", "../id_ed25519"]
)
def test_a_forged_record_brings_and_gives_only_what_stages_leave(client: Any, run: Run, other: Run, name: str) -> None:
    """A container may write any record to the store, which is the client's a moment later."""
    named = name.format(run=below(run, run.paths.directory))
    path = write(run.paths.root / named, b"evil, or secret")
    record_path = run.paths.record_path("download")
    outputs = (Output(named, path.stat().st_size, ""),)
    record = Record("download", run.plan["download"].fingerprint, {}, outputs, {}, utc_now(), 0.0, "host", "1")
    record.write(record_path)
    assert run.journal.is_done("download")
    with pytest.raises(UserError, match=re.escape(named)):
        RunStore(run, client).push_stage("download")
    assert not stored(client)
    client.put_object(Bucket="bucket", Key=f"store/{below(run, record_path)}", Body=record_path.read_bytes())
    path.unlink()
    with pytest.raises(UserError, match=re.escape(named)):
        RunStore(other, client).pull_needs("dataset")
    assert not (other.paths.root / named).exists()
