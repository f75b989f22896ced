"""Checkpoints of one node in a run's store: pushed, pulled, superseded, damaged, and killed on the way."""

from typing import Any

import pytest

from hyperpod_ft import publish
from hyperpod_ft.aws.s3 import trees
from hyperpod_ft.checkpoint.sharded import description
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker.store.run_store import RunStore
from hyperpod_ft.sagemaker.store.stored_checkpoints import superseded
from tests.aws.killing import killed
from tests.aws.run_store.stored_runs import CONTENT, STORE, below, make_checkpoint, make_run, stored, write
from tests.unit.stage_runs import tree


def test_a_checkpoint_of_one_node(client: Any, run: Run, other: Run) -> None:
    store = RunStore(run, client)
    assert RunStore(other, client).pull_checkpoint() is None
    write(run.paths.metrics_path, b'{"step": 4}\n')
    content = {".metadata": b"m", "__0_0.distcp": b"zero", "resume/rank": b"r"}
    assert store.push_checkpoint(make_checkpoint(run, 4, content))
    assert RunStore(other, client).pull_checkpoint() == other.paths.checkpoint(4)
    assert tree(other.paths.checkpoint(4)) == tree(run.paths.checkpoint(4))
    assert other.paths.metrics_path.read_bytes() == b'{"step": 4}\n'
    assert not (run.paths.checkpoints / ".pushing/step-00000004").exists()
    # what is here is not fetched again, and metrics that go on are kept
    write(other.paths.metrics_path, b"longer")
    assert RunStore(other, client).pull_checkpoint() == other.paths.checkpoint(4)
    assert other.paths.metrics_path.read_bytes() == b"longer"


def test_a_checkpoint_that_training_has_removed(client: Any, run: Run) -> None:
    assert not RunStore(run, client).push_checkpoint(run.paths.checkpoint(4))
    assert not stored(client, below(run, run.paths.checkpoints))


def test_old_checkpoints_go_and_nothing_else(client: Any, run: Run) -> None:
    store = RunStore(run, client)
    client.put_object(Bucket="bucket", Key=f"store/{below(run, run.paths.checkpoint(2))}/theirs", Body=b"")
    client.put_object(Bucket="bucket", Key=f"store/{below(run, run.paths.checkpoints)}/notes.txt", Body=b"")
    client.put_object(Bucket="bucket", Key=f"store/{below(run, run.paths.checkpoint(3))}/__0_0.distcp", Body=b"left")
    for step in (2, 4, 6):
        store.push_checkpoint(make_checkpoint(run, step, {"__0_0.distcp": b"%d" % step}))
        store.push_checkpoint(make_checkpoint(run, step - 1, {"b": b"%d" % step}, best=True))
    checkpoints = below(run, run.paths.checkpoints)
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
    assert (other.paths.best_checkpoint / "b").read_bytes() == b"three"


def damage(client: Any, run: Run, step: int) -> None:
    """Push another file than the one that the description of a checkpoint has the digest of."""
    name = f"{below(run, run.paths.checkpoint(step))}/a"
    write(run.paths.root / "other" / name, b"0" * 4)
    trees.push(client, STORE, run.paths.root / "other", [run.paths.root / "other" / name])


def test_a_damaged_checkpoint_of_the_store_is_passed_over(
    client: Any, run: Run, other: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    store = RunStore(run, client)
    for step, content in ((2, b"two2"), (4, b"four")):
        store.push_checkpoint(make_checkpoint(run, step, {"a": content}))
    damage(client, run, 4)
    assert RunStore(other, client).pull_checkpoint() == other.paths.checkpoint(2)
    assert (other.paths.checkpoint(2) / "a").read_bytes() == b"two2"
    assert not (other.paths.checkpoint(4) / description.NAME).exists()
    assert "step-00000004 of the store: a is damaged" in capsys.readouterr().out
    damage(client, run, 2)
    publish.remove(other.paths.checkpoints)
    with pytest.raises(UserError, match="every complete checkpoint is damaged: step-00000004, step-00000002"):
        RunStore(other, client).pull_checkpoint()


def test_a_checkpoint_that_is_damaged_here_is_pulled_again(client: Any, run: Run) -> None:
    RunStore(run, client).push_checkpoint(make_checkpoint(run, 4, {"a": b"four"}))
    write(run.paths.checkpoint(4) / "a", b"0000")
    assert RunStore(run, client).pull_checkpoint() == run.paths.checkpoint(4)
    assert (run.paths.checkpoint(4) / "a").read_bytes() == b"four"


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
        assert not store.push_checkpoint(run.paths.checkpoint(step))
        assert f"not pushing checkpoint step-0000000{step}: a is damaged" in capsys.readouterr().out
    assert RunStore(other, client).pull_checkpoint() == other.paths.checkpoint(4)
    assert tree(other.paths.checkpoint(4))["a"] == b"good"


def test_the_checkpoint_that_another_node_has_pulled(client: Any, run: Run, other: Run) -> None:
    """The first node got step 2, and step 4 was complete afterwards."""
    store = RunStore(run, client)
    for step in (2, 4):
        store.push_checkpoint(make_checkpoint(run, step, {"a": b"%d" % step}))
    assert RunStore(other, client).pull_checkpoint(2) == other.paths.checkpoint(2)
    assert not other.paths.checkpoint(4).exists()
    # one that the store no longer has
    assert RunStore(other, client).pull_checkpoint(1) == other.paths.checkpoint(4)


def test_a_checkpoint_that_is_superseded_while_it_is_pulled(
    client: Any, run: Run, other: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, pull_named = RunStore(make_run(run.paths.root, keep_checkpoints=1), client), trees.pull_named
    store.push_checkpoint(make_checkpoint(run, 4, {"a": b"four"}))

    def late(*arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(trees, "pull_named", pull_named)
        store.push_checkpoint(make_checkpoint(run, 6, {"a": b"six"}))
        pull_named(*arguments, **options)

    monkeypatch.setattr(trees, "pull_named", late)
    assert RunStore(other, client).pull_checkpoint() == other.paths.checkpoint(6)


@pytest.mark.parametrize("count", range(2, 20, 3))
def test_kills_while_a_checkpoint_travels(client: Any, run: Run, other: Run, count: int) -> None:
    """At no request does the store, or the volume, hold a checkpoint that looks complete and is not."""
    RunStore(run, client).push_checkpoint(make_checkpoint(run, 2, CONTENT))
    make_checkpoint(run, 4, CONTENT)
    was_killed = killed(lambda own: RunStore(run, own).push_checkpoint(run.paths.checkpoint(4)), count)
    found = RunStore(other, client).pull_checkpoint()
    assert found in (
        (other.paths.checkpoint(2), other.paths.checkpoint(4)) if was_killed else (other.paths.checkpoint(4),)
    )
    assert found is not None
    assert tree(found) == tree(run.paths.directory / found.relative_to(other.paths.directory))
    publish.remove(other.paths.checkpoints)
    RunStore(run, client).push_checkpoint(run.paths.checkpoint(4))
    killed(lambda own: RunStore(other, own).pull_checkpoint(), count)
    for path in other.paths.checkpoints_by_step().values():
        assert not (path / "checkpoint.json").exists() or tree(path) == tree(run.paths.checkpoint(4))
    assert RunStore(other, client).pull_checkpoint() == other.paths.checkpoint(4)
    assert tree(other.paths.checkpoint(4)) == tree(run.paths.checkpoint(4))


def test_superseded_checkpoints() -> None:
    steps = [f"step-0000000{step}" for step in range(1, 6)]
    assert superseded(steps, steps[4], 2) == steps[:3]
    assert superseded(steps, steps[1], 2) == [steps[0], *steps[2:4]]  # resumed from before damaged ones
    assert superseded(steps, steps[4], 1) == steps[:4]
    best = [f"best-0000000{step}" for step in (1, 2, 4)]
    assert superseded([*steps[2:], *best], best[2], 3) == [best[0]]
    assert superseded([], steps[0], 2) == []
