"""Which checkpoint ranks resume from, on nodes that share a volume and on nodes that do not."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hyperpod_ft.config import run_file
from hyperpod_ft.engines import newest_checkpoint, ranks
from hyperpod_ft.engines.interface import TrainingProgress
from hyperpod_ft.engines.ranks import Ranks, Volume
from hyperpod_ft.runs.run import Run
from tests.tasks import task_without_model
from tests.unit.described_checkpoints import describe

CONTENT = {"__0_0.distcp": b"zero", "__1_0.distcp": b"one"}
FIRST, SECOND = CONTENT  # what each of two nodes writes


def run_below(root: Path) -> Run:
    values: dict[str, Any] = {
        "name": "test",
        "engine": "torch",
        "cluster": {"root": str(root), "instance_type": "local", "nodes": 2},
        "parallelism": {"ranks_per_node": 1},
        "env": {"python": "current"},
        "model": {"source": "org/model", "revision": "0" * 40},
        "dataset": {"source": "org/data", "revision": "0" * 40, "format": "dolly"},
    }
    return Run.of(run_file.resolve(run_file.validate(values, "test"), root))


@pytest.fixture
def nodes(tmp_path: Path) -> list[Run]:
    """One run as two nodes have it that share no volume."""
    return [run_below(tmp_path / name) for name in ("one", "two")]


def checkpoint(run: Run, step: int, *here: str, content: Mapping[str, bytes] = CONTENT) -> Path:
    """A checkpoint of these files, of which those are `here`; by default all."""
    directory = run.paths.checkpoint(step)
    directory.mkdir(parents=True)
    for name in here or content:
        (directory / name).write_bytes(content[name])
    progress, fingerprint = asdict(TrainingProgress(step=step)), run.plan["train"].fingerprint
    return describe(directory, content, step=step, fingerprint=fingerprint, ranks=2, progress=progress)


def find(runs: list[Run], shared: bool = False, ranks_of_node: int = 1) -> list[TrainingProgress | None]:
    """What the ranks find; `runs` by node."""
    store, world = dist.HashStore(), len(runs) * ranks_of_node

    def of_rank(rank: int) -> TrainingProgress | None:
        node, local = divmod(rank, ranks_of_node)
        volume = Volume(leads=rank == 0 or (not shared and local == 0), shared=shared)
        return newest_checkpoint.find(task_without_model(runs[node]), Ranks(rank, world, local, store), volume)

    with ThreadPoolExecutor(world) as pool:
        return [found.result() for found in [pool.submit(of_rank, rank) for rank in range(world)]]


@pytest.fixture(autouse=True)
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "COLLECTIVE_TIMEOUT", timedelta(seconds=300))


def test_nodes_agree_on_the_newest_that_all_have(nodes: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    """One has pulled step 4 before step 6 was in the store; the other has pulled step 6 too."""
    for run in nodes:
        checkpoint(run, 4)
    checkpoint(nodes[0], 6, FIRST)
    checkpoint(nodes[1], 6)
    assert find(nodes) == [TrainingProgress(step=4)] * 2
    assert "ignoring checkpoint step-00000006: not every node has all of its files" in capsys.readouterr().out


@pytest.mark.parametrize("second_has", [(), (SECOND,)], ids=["nothing", "its part"])
def test_without_a_common_checkpoint_training_does_not_start_again(
    nodes: list[Run], second_has: tuple[str, ...]
) -> None:
    """Each has the newest one of the moment when it pulled."""
    checkpoint(nodes[0], 4)
    checkpoint(nodes[1], 6)
    if second_has:
        checkpoint(nodes[1], 4, *second_has)
    checkpoint(nodes[0], 6, FIRST)
    with pytest.raises(RuntimeError, match="step-00000006 is complete on some nodes only"):
        find(nodes)


def test_two_checkpoints_of_one_step_are_not_the_same(nodes: list[Run]) -> None:
    """Accelerators need not repeat a step bit by bit."""
    for run, value in zip(nodes, (b"zero", b"ZERO"), strict=True):
        checkpoint(run, 2)
        checkpoint(run, 4, content=CONTENT | {FIRST: value})
    assert find(nodes) == [TrainingProgress(step=2)] * 2


def test_parts_of_a_checkpoint_that_no_node_has_whole_are_no_checkpoint(nodes: list[Run]) -> None:
    checkpoint(nodes[0], 4, FIRST)
    checkpoint(nodes[1], 4, SECOND)
    assert find(nodes) == [None, None]


@pytest.mark.parametrize("damaged", [FIRST, SECOND])
def test_a_damaged_file_on_any_node_is_seen(nodes: list[Run], damaged: str) -> None:
    for run in nodes:
        checkpoint(run, 2)
        checkpoint(run, 4)
    (nodes[1].paths.checkpoint(4) / damaged).write_bytes(CONTENT[damaged][::-1])
    assert find(nodes, ranks_of_node=2) == [TrainingProgress(step=2)] * 4


def test_on_a_shared_volume_damaged_checkpoints_are_passed_over(nodes: list[Run]) -> None:
    run = nodes[0]
    for step in (2, 4):
        checkpoint(run, step)
    (run.paths.checkpoint(4) / SECOND).write_bytes(b"eno")
    assert find([run, run], shared=True) == [TrainingProgress(step=2)] * 2
    (run.paths.checkpoint(2) / SECOND).unlink()
    assert find([run, run], shared=True) == [None, None]


def test_a_probe_that_a_killed_process_left_is_named_as_a_leftover(tmp_path: Path) -> None:
    class Killed(Ranks):
        def gather(self, occasion: str, value: Any) -> list[Any]:
            if occasion == "volume/made":
                raise KeyboardInterrupt
            return super().gather(occasion, value)

    with pytest.raises(KeyboardInterrupt):
        ranks.volume_of(tmp_path, Killed(0, 1, 0, dist.HashStore()))
    (left,) = tmp_path.iterdir()
    assert left.match(".*.partial*"), "as docs/when-something-fails.md has users find them"


def test_a_validation_loss_that_is_no_number_is_not_the_best() -> None:
    first = TrainingProgress(step=1).validated(float("nan"), None, {})
    assert first.best_step is None and first.validations_since_best == 1
    assert TrainingProgress(step=2).validated(3.0, None, {}).validated(float("nan"), 1, {}).stopped_early
    later = TrainingProgress(**(asdict(first) | {"step": 2})).validated(5.0, None, {})
    assert (later.best_step, later.best_validation_loss) == (2, 5.0)
