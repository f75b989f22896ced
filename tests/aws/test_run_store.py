"""A run's store, on moto's S3: what each stage needs and gives, checkpoints of one node and of several, kills."""

import os
import struct
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft import publish
from hyperpod_ft.aws.s3 import trees
from hyperpod_ft.aws.session import Session
from hyperpod_ft.checkpoint.formats import resumable
from hyperpod_ft.checkpoint.sharded import description
from hyperpod_ft.checkpoint.sharded.description import BaseModelSource, Description, RankDegrees
from hyperpod_ft.config import run_file
from hyperpod_ft.digests import file_xxh3
from hyperpod_ft.errors import UserError
from hyperpod_ft.job.sagemaker import container_commands
from hyperpod_ft.launch.sagemaker.store import checkpoint_store
from hyperpod_ft.launch.sagemaker.store.run_store import RunStore
from hyperpod_ft.launch.sagemaker.store.stored_checkpoints import superseded
from hyperpod_ft.runs.run import Run
from tests.aws.conftest import Aws
from tests.aws.killing import killed
from tests.unit.stage_runs import finish, tree

STORE = "s3://bucket/store"


@pytest.fixture
def client(aws: Aws) -> Any:
    found = Session().client("s3", connections=8)
    found.create_bucket(Bucket="bucket", CreateBucketConfiguration={"LocationConstraint": aws.region})
    return found


def make_run(root: Path, **training: Any) -> Run:
    """The same run on each machine, at the same path as the others see it."""
    values = {
        "name": "test",
        "engine": "torch",
        "cluster": {"root": str(root), "instance_type": "local"},
        "parallelism": {"ranks_per_node": 1},
        "env": {"python": "current"},
        "model": {"source": "org/model", "revision": "0" * 40},
        "dataset": {"source": "org/data", "revision": "0" * 40, "format": "dolly"},
        "training": training,
        "sagemaker": {"region": "us-west-2", "role": "arn:aws:iam::111122223333:role/r", "store": STORE},
    }
    run = Run.of(run_file.resolve(run_file.validate(values, "test"), root))
    run.freeze()
    return run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "one")


@pytest.fixture
def other(tmp_path: Path) -> Run:
    return make_run(tmp_path / "two")


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def finish_download(run: Run) -> None:
    write(run.base_model / "model.safetensors", os.urandom(100_000))
    write(run.base_model / ".hyperpod-ft.json", b"{}")
    write(run.raw_dataset / "rows/train.jsonl", b"{}\n")
    finish(run, "download", run.base_model, run.raw_dataset)


def make_checkpoint(
    run: Run, step: int, content: dict[str, bytes], here: tuple[str, ...] = (), best: bool = False
) -> Path:
    """A published checkpoint of these files, of which only some are `here`; by default all."""
    final = run.best_checkpoint if best else run.checkpoint(step)
    publish.remove(final)
    for name in here or tuple(content):
        write(final / name, content[name])
    described = Description(
        engine="torch",
        step=step,
        fingerprint=run.plan["train"].fingerprint,
        method="full",
        base_model=BaseModelSource(source="org/model", revision=None),
        lora=None,
        degrees=RankDegrees(world_size=2, data_parallel=2, pipeline_parallel=1, tensor_parallel=1),
        progress={},
        files={name: len(data) for name, data in content.items()},
        sha256={name: sha256(data).hexdigest() for name, data in content.items()},
    )
    description.write(final, described)
    return final


def stored(client: Any, below: str = "") -> set[str]:
    return {entry.name for entry in trees.listing(client, STORE, below)}


def below(run: Run, path: Path) -> str:
    return path.relative_to(run.root).as_posix()


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


def test_a_checkpoint_of_one_node(client: Any, run: Run, other: Run) -> None:
    store = RunStore(run, client)
    assert RunStore(other, client).pull_checkpoint() is None
    write(run.metrics_path, b'{"step": 4}\n')
    content = {".metadata": b"m", "__0_0.distcp": b"zero", "resume/rank": b"r"}
    assert store.push_checkpoint(make_checkpoint(run, 4, content))
    assert RunStore(other, client).pull_checkpoint() == other.checkpoint(4)
    assert tree(other.checkpoint(4)) == tree(run.checkpoint(4))
    assert other.metrics_path.read_bytes() == b'{"step": 4}\n'
    assert not (run.checkpoints / ".pushing/step-00000004").exists()
    # what is here is not fetched again, and metrics that go on are kept
    write(other.metrics_path, b"longer")
    assert RunStore(other, client).pull_checkpoint() == other.checkpoint(4)
    assert other.metrics_path.read_bytes() == b"longer"


def test_a_checkpoint_that_training_has_removed(client: Any, run: Run) -> None:
    assert not RunStore(run, client).push_checkpoint(run.checkpoint(4))
    assert not stored(client, below(run, run.checkpoints))


def test_old_checkpoints_go_and_nothing_else(client: Any, run: Run) -> None:
    store = RunStore(run, client)
    client.put_object(Bucket="bucket", Key=f"store/{below(run, run.checkpoint(2))}/theirs", Body=b"")
    client.put_object(Bucket="bucket", Key=f"store/{below(run, run.checkpoints)}/notes.txt", Body=b"")
    client.put_object(Bucket="bucket", Key=f"store/{below(run, run.checkpoint(3))}/__0_0.distcp", Body=b"left")
    for step in (2, 4, 6):
        store.push_checkpoint(make_checkpoint(run, step, {"__0_0.distcp": b"%d" % step}))
        store.push_checkpoint(make_checkpoint(run, step - 1, {"b": b"%d" % step}, best=True))
    checkpoints = below(run, run.checkpoints)
    assert {name.removeprefix(f"{checkpoints}/") for name in stored(client, checkpoints)} == {
        "step-00000002/theirs",
        "notes.txt",
        *(f"step-0000000{step}/{name}" for step in (4, 6) for name in ("__0_0.distcp", "checkpoint.json")),
        *(f"best-0000000{step}/{name}" for step in (3, 5) for name in ("b", "checkpoint.json")),
    }


def test_the_best_weights_as_of_the_checkpoint(client: Any, run: Run, other: Run) -> None:
    store = RunStore(run, client)
    store.push_checkpoint(make_checkpoint(run, 3, {"b": b"three"}, best=True))
    store.push_checkpoint(make_checkpoint(run, 4, {"a": b"four"}))
    store.push_checkpoint(make_checkpoint(run, 5, {"b": b"five"}, best=True))
    RunStore(other, client).pull_checkpoint()
    assert (other.best_checkpoint / "b").read_bytes() == b"three"


def damage(client: Any, run: Run, step: int) -> None:
    """Push another file than the one that the description of a checkpoint has the digest of."""
    name = f"{below(run, run.checkpoint(step))}/a"
    write(run.root / "other" / name, b"0" * 4)
    trees.push(client, STORE, run.root / "other", [run.root / "other" / name])


def test_a_damaged_checkpoint_of_the_store_is_passed_over(
    client: Any, run: Run, other: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    store = RunStore(run, client)
    for step, content in ((2, b"two2"), (4, b"four")):
        store.push_checkpoint(make_checkpoint(run, step, {"a": content}))
    damage(client, run, 4)
    assert RunStore(other, client).pull_checkpoint() == other.checkpoint(2)
    assert (other.checkpoint(2) / "a").read_bytes() == b"two2"
    assert not (other.checkpoint(4) / description.NAME).exists()
    assert "step-00000004 of the store: a is damaged" in capsys.readouterr().out
    damage(client, run, 2)
    publish.remove(other.checkpoints)
    with pytest.raises(UserError, match="every complete checkpoint is damaged: step-00000004, step-00000002"):
        RunStore(other, client).pull_checkpoint()


def test_a_checkpoint_that_is_damaged_here_is_pulled_again(client: Any, run: Run) -> None:
    RunStore(run, client).push_checkpoint(make_checkpoint(run, 4, {"a": b"four"}))
    write(run.checkpoint(4) / "a", b"0000")
    assert RunStore(run, client).pull_checkpoint() == run.checkpoint(4)
    assert (run.checkpoint(4) / "a").read_bytes() == b"four"


def test_a_damaged_checkpoint_is_not_pushed(
    client: Any, run: Run, other: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does it replace the one in the store."""
    store = RunStore(run, client)
    for step in (2, 4):
        assert store.push_checkpoint(make_checkpoint(run, step, {"a": b"good"}))
    write(make_checkpoint(run, 4, {"a": b"once more"}) / "a", b"0" * 9)
    write(make_checkpoint(run, 6, {"a": b"good"}) / "a", b"0000")
    for step in (4, 6):
        assert not store.push_checkpoint(run.checkpoint(step))
        assert f"not pushing checkpoint step-0000000{step}: a is damaged" in capsys.readouterr().out
    assert RunStore(other, client).pull_checkpoint() == other.checkpoint(4)
    assert tree(other.checkpoint(4))["a"] == b"good"


def test_the_checkpoint_that_another_node_has_pulled(client: Any, run: Run, other: Run) -> None:
    """The first node got step 2, and step 4 was complete afterwards."""
    store = RunStore(run, client)
    for step in (2, 4):
        store.push_checkpoint(make_checkpoint(run, step, {"a": b"%d" % step}))
    assert RunStore(other, client).pull_checkpoint(2) == other.checkpoint(2)
    assert not other.checkpoint(4).exists()
    # one that the store no longer has
    assert RunStore(other, client).pull_checkpoint(1) == other.checkpoint(4)


def test_a_checkpoint_that_is_superseded_while_it_is_pulled(
    client: Any, run: Run, other: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, pull_named = RunStore(make_run(run.root, keep_checkpoints=1), client), trees.pull_named
    store.push_checkpoint(make_checkpoint(run, 4, {"a": b"four"}))

    def late(*arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(trees, "pull_named", pull_named)
        store.push_checkpoint(make_checkpoint(run, 6, {"a": b"six"}))
        pull_named(*arguments, **options)

    monkeypatch.setattr(trees, "pull_named", late)
    assert RunStore(other, client).pull_checkpoint() == other.checkpoint(6)


CONTENT = {".metadata": b"m", "__0_0.distcp": b"zero", "__1_0.distcp": b"one"}
NODES = ((".metadata", "__0_0.distcp"), ("__1_0.distcp",))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_store, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(checkpoint_store, "PATIENCE_SECONDS", 0.1)


@pytest.mark.usefixtures("quick")
def test_a_checkpoint_of_two_nodes(client: Any, run: Run, other: Run, tmp_path: Path) -> None:
    nodes = (run, other)
    for node, content in zip(nodes, NODES, strict=True):
        make_checkpoint(node, 4, CONTENT, here=content)
    marker = f"{below(run, run.checkpoint(4))}/checkpoint.json"
    with pytest.raises(UserError, match="node 1 has not pushed its files"):
        RunStore(run, client).push_checkpoint(run.checkpoint(4), 0, 2)
    assert marker not in stored(client)
    assert RunStore(other, client).push_checkpoint(other.checkpoint(4), 1, 2)
    assert marker not in stored(client)
    assert RunStore(run, client).push_checkpoint(run.checkpoint(4), 0, 2)
    assert marker in stored(client)
    assert not any("/votes/" in name for name in stored(client))
    for node in nodes:
        assert RunStore(node, client).pull_checkpoint() == node.checkpoint(4)
        assert {name: data for name, data in tree(node.checkpoint(4)).items() if name != "checkpoint.json"} == CONTENT
    # the stages after training, on one node, get the files of both
    finish(run, "train", make_checkpoint(run, 4, CONTENT, here=NODES[0]))
    RunStore(run, client).push_stage("train")
    third = make_run(tmp_path / "three")
    RunStore(third, client).pull_stage("train")
    assert tree(third.checkpoint(4)).keys() == {*CONTENT, "checkpoint.json"}
    assert third.is_done("train")


@pytest.mark.usefixtures("quick")
def test_votes_of_an_attempt_that_was_lost_do_not_count(client: Any, run: Run, other: Run) -> None:
    """Accelerators need not repeat a step bit by bit: the files of two attempts must not be mixed."""
    make_checkpoint(other, 4, CONTENT, here=NODES[1])
    RunStore(other, client).push_checkpoint(other.checkpoint(4), 1, 2)
    again = CONTENT | {"__0_0.distcp": b"ZERO", "__1_0.distcp": b"ONE"}
    make_checkpoint(run, 4, again, here=NODES[0])
    with pytest.raises(UserError, match="node 1 has not pushed its files"):
        RunStore(run, client).push_checkpoint(run.checkpoint(4), 0, 2)
    make_checkpoint(other, 4, again, here=NODES[1])
    assert RunStore(other, client).push_checkpoint(other.checkpoint(4), 1, 2)
    assert RunStore(run, client).push_checkpoint(run.checkpoint(4), 0, 2)
    assert RunStore(run, client).pull_checkpoint() == run.checkpoint(4)
    assert (run.checkpoint(4) / "__1_0.distcp").read_bytes() == b"ONE"


def test_the_first_node_does_not_wait_for_votes_of_an_attempt_that_was_lost(
    client: Any, run: Run, other: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it waits, the next attempt writes other files of the same step, and the other node votes for them."""
    again = CONTENT | {"__0_0.distcp": b"ZERO", "__1_0.distcp": b"ONE"}
    make_checkpoint(run, 4, CONTENT, here=NODES[0])
    waited: list[float] = []

    def replace_meanwhile(seconds: float) -> None:
        assert not waited, "it has been replaced"
        waited.append(seconds)
        make_checkpoint(other, 4, again, here=NODES[1])
        assert RunStore(other, client).push_checkpoint(other.checkpoint(4), 1, 2)
        make_checkpoint(run, 4, again, here=NODES[0])

    monkeypatch.setattr(time, "sleep", replace_meanwhile)
    assert not RunStore(run, client).push_checkpoint(run.checkpoint(4), 0, 2)
    assert RunStore(run, client).push_checkpoint(run.checkpoint(4), 0, 2)
    assert RunStore(run, client).pull_checkpoint() == run.checkpoint(4)
    assert (run.checkpoint(4) / "__1_0.distcp").read_bytes() == b"ONE"


def test_the_best_weights_of_a_step_are_pushed_though_later_ones_are_better(
    client: Any, run: Run, other: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One directory on the volume has the best weights of every step, one after the other."""
    make_checkpoint(run, 3, CONTENT, here=NODES[0], best=True)
    make_checkpoint(other, 3, CONTENT, here=NODES[1], best=True)

    def training_goes_on(seconds: float) -> None:
        make_checkpoint(run, 5, CONTENT | {"__0_0.distcp": b"ZERO"}, here=NODES[0], best=True)
        monkeypatch.setattr(time, "sleep", vote)

    def vote(seconds: float) -> None:
        assert RunStore(other, client).push_checkpoint(other.best_checkpoint, 1, 2)

    monkeypatch.setattr(time, "sleep", training_goes_on)
    assert RunStore(run, client).push_checkpoint(run.best_checkpoint, 0, 2)
    assert f"{below(run, run.checkpoints)}/best-00000003/checkpoint.json" in stored(client)


@pytest.mark.usefixtures("quick")
def test_a_node_that_has_gone_on_without_a_checkpoint(client: Any, run: Run, other: Run) -> None:
    """Its training has removed step 4 before it came to push it."""
    make_checkpoint(other, 6, CONTENT, here=NODES[1])
    assert not RunStore(other, client).push_checkpoint(other.checkpoint(4), 1, 2)
    assert RunStore(other, client).push_checkpoint(other.checkpoint(6), 1, 2)
    for step in (4, 6):
        make_checkpoint(run, step, CONTENT, here=NODES[0])
    assert not RunStore(run, client).push_checkpoint(run.checkpoint(4), 0, 2)
    assert RunStore(run, client).push_checkpoint(run.checkpoint(6), 0, 2)
    assert RunStore(run, client).pull_checkpoint() == run.checkpoint(6)
    assert {Path(name).parent.name for name in stored(client, below(run, run.checkpoints))} == {"step-00000006"}


def test_a_training_whose_checkpoint_is_incomplete_is_not_pushed(client: Any, run: Run) -> None:
    finish(run, "train", make_checkpoint(run, 4, CONTENT, here=NODES[0]))
    with pytest.raises(UserError, match="step-00000004: is not complete"):
        RunStore(run, client).push_stage("train")
    assert below(run, run.record_path("train")) not in stored(client)


@pytest.mark.parametrize("count", range(2, 20, 3))
def test_kills_while_a_checkpoint_travels(client: Any, run: Run, other: Run, count: int) -> None:
    """At no request does the store, or the volume, hold a checkpoint that looks complete and is not."""
    RunStore(run, client).push_checkpoint(make_checkpoint(run, 2, CONTENT))
    make_checkpoint(run, 4, CONTENT)
    was_killed = killed(lambda own: RunStore(run, own).push_checkpoint(run.checkpoint(4)), count)
    found = RunStore(other, client).pull_checkpoint()
    assert found in ((other.checkpoint(2), other.checkpoint(4)) if was_killed else (other.checkpoint(4),))
    assert found is not None
    assert tree(found) == tree(run.directory / found.relative_to(other.directory))
    publish.remove(other.checkpoints)
    RunStore(run, client).push_checkpoint(run.checkpoint(4))
    killed(lambda own: RunStore(other, own).pull_checkpoint(), count)
    for path in other.checkpoints_by_step().values():
        assert not (path / "checkpoint.json").exists() or tree(path) == tree(run.checkpoint(4))
    assert RunStore(other, client).pull_checkpoint() == other.checkpoint(4)
    assert tree(other.checkpoint(4)) == tree(run.checkpoint(4))


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


def test_superseded_checkpoints() -> None:
    steps = [f"step-0000000{step}" for step in range(1, 6)]
    assert superseded(steps, steps[4], 2) == steps[:3]
    assert superseded(steps, steps[1], 2) == [steps[0], *steps[2:4]]  # resumed from before damaged ones
    assert superseded(steps, steps[4], 1) == steps[:4]
    best = [f"best-0000000{step}" for step in (1, 2, 4)]
    assert superseded([*steps[2:], *best], best[2], 3) == [best[0]]
    assert superseded([], steps[0], 2) == []
