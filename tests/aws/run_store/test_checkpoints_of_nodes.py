"""Checkpoints of several nodes in a run's store: complete only with the files of all."""

import time
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker.store import checkpoint_store
from hyperpod_ft.sagemaker.store.run_store import RunStore
from tests.aws.run_store.stored_runs import CONTENT, below, make_checkpoint, make_run, stored
from tests.unit.stage_runs import finish, tree

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
    marker = f"{below(run, run.paths.checkpoint(4))}/checkpoint.json"
    with pytest.raises(UserError, match="node 1 has not pushed its files"):
        RunStore(run, client).push_checkpoint(run.paths.checkpoint(4), 0, 2)
    assert marker not in stored(client)
    assert RunStore(other, client).push_checkpoint(other.paths.checkpoint(4), 1, 2)
    assert marker not in stored(client)
    assert RunStore(run, client).push_checkpoint(run.paths.checkpoint(4), 0, 2)
    assert marker in stored(client)
    assert not any("/votes/" in name for name in stored(client))
    for node in nodes:
        assert RunStore(node, client).pull_checkpoint() == node.paths.checkpoint(4)
        assert {
            name: data for name, data in tree(node.paths.checkpoint(4)).items() if name != "checkpoint.json"
        } == CONTENT
    # the stages after training, on one node, get the files of both
    finish(run, "train", make_checkpoint(run, 4, CONTENT, here=NODES[0]))
    RunStore(run, client).push_stage("train")
    third = make_run(tmp_path / "three")
    RunStore(third, client).pull_stage("train")
    assert tree(third.paths.checkpoint(4)).keys() == {*CONTENT, "checkpoint.json"}
    assert third.journal.is_done("train")


def test_the_best_weights_are_pushed_once_and_complete(client: Any, run: Run, other: Run, tmp_path: Path) -> None:
    """They are what the record of such a training lists, by their name on the first node, which has a part of them."""
    for node, content in zip((run, other), NODES, strict=True):
        make_checkpoint(node, 4, CONTENT, here=content, best=True)
    assert RunStore(other, client).push_checkpoint(other.paths.best_checkpoint, 1, 2)
    assert RunStore(run, client).push_checkpoint(run.paths.best_checkpoint, 0, 2)
    finish(run, "train", run.paths.best_checkpoint, facts={"best_step": 4})
    RunStore(run, client).push_stage("train")
    checkpoints = below(run, run.paths.checkpoints)
    assert {Path(name).parent.name for name in stored(client, checkpoints)} == {"best-00000004"}
    RunStore(other, client).refresh()
    publish.remove(other.paths.checkpoints)
    assert other.journal.is_done("train"), "where it was submitted"
    third = make_run(tmp_path / "three")
    RunStore(third, client).pull_stage("train")
    assert tree(third.paths.best_checkpoint).keys() == {*CONTENT, "checkpoint.json"}
    assert third.journal.is_done("train")


@pytest.mark.usefixtures("quick")
def test_votes_of_an_attempt_that_was_lost_do_not_count(client: Any, run: Run, other: Run) -> None:
    """Accelerators need not repeat a step bit by bit: the files of two attempts must not be mixed."""
    make_checkpoint(other, 4, CONTENT, here=NODES[1])
    RunStore(other, client).push_checkpoint(other.paths.checkpoint(4), 1, 2)
    again = CONTENT | {"__0_0.distcp": b"ZERO", "__1_0.distcp": b"ONE"}
    make_checkpoint(run, 4, again, here=NODES[0])
    with pytest.raises(UserError, match="node 1 has not pushed its files"):
        RunStore(run, client).push_checkpoint(run.paths.checkpoint(4), 0, 2)
    make_checkpoint(other, 4, again, here=NODES[1])
    assert RunStore(other, client).push_checkpoint(other.paths.checkpoint(4), 1, 2)
    assert RunStore(run, client).push_checkpoint(run.paths.checkpoint(4), 0, 2)
    assert RunStore(run, client).pull_checkpoint() == run.paths.checkpoint(4)
    assert (run.paths.checkpoint(4) / "__1_0.distcp").read_bytes() == b"ONE"


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
        assert RunStore(other, client).push_checkpoint(other.paths.checkpoint(4), 1, 2)
        make_checkpoint(run, 4, again, here=NODES[0])

    monkeypatch.setattr(time, "sleep", replace_meanwhile)
    assert not RunStore(run, client).push_checkpoint(run.paths.checkpoint(4), 0, 2)
    assert RunStore(run, client).push_checkpoint(run.paths.checkpoint(4), 0, 2)
    assert RunStore(run, client).pull_checkpoint() == run.paths.checkpoint(4)
    assert (run.paths.checkpoint(4) / "__1_0.distcp").read_bytes() == b"ONE"


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
        assert RunStore(other, client).push_checkpoint(other.paths.best_checkpoint, 1, 2)

    monkeypatch.setattr(time, "sleep", training_goes_on)
    assert RunStore(run, client).push_checkpoint(run.paths.best_checkpoint, 0, 2)
    assert f"{below(run, run.paths.checkpoints)}/best-00000003/checkpoint.json" in stored(client)


@pytest.mark.usefixtures("quick")
def test_a_node_that_has_gone_on_without_a_checkpoint(client: Any, run: Run, other: Run) -> None:
    """Its training has removed step 4 before it came to push it."""
    make_checkpoint(other, 6, CONTENT, here=NODES[1])
    assert not RunStore(other, client).push_checkpoint(other.paths.checkpoint(4), 1, 2)
    assert RunStore(other, client).push_checkpoint(other.paths.checkpoint(6), 1, 2)
    for step in (4, 6):
        make_checkpoint(run, step, CONTENT, here=NODES[0])
    assert not RunStore(run, client).push_checkpoint(run.paths.checkpoint(4), 0, 2)
    assert RunStore(run, client).push_checkpoint(run.paths.checkpoint(6), 0, 2)
    assert RunStore(run, client).pull_checkpoint() == run.paths.checkpoint(6)
    assert {Path(name).parent.name for name in stored(client, below(run, run.paths.checkpoints))} == {"step-00000006"}


def test_a_training_whose_checkpoint_is_incomplete_is_not_pushed(client: Any, run: Run) -> None:
    finish(run, "train", make_checkpoint(run, 4, CONTENT, here=NODES[0]))
    with pytest.raises(UserError, match=r"step-00000004/__1_0\.distcp"):
        RunStore(run, client).push_stage("train")
    assert below(run, run.paths.record_path("train")) not in stored(client)
