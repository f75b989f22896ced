"""Memory checkpoints of ranks that are forks of pytest, each a node of its own."""

import multiprocessing
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from hyperpod_ft.engines.interface import TrainingProgress
from hyperpod_ft.engines.ranks import Ranks
from hyperpod_ft.engines.torch.memory_checkpoints import MemoryCheckpoints
from hyperpod_ft.engines.torch.node_memory import node_memory
from hyperpod_ft.errors import UserError
from tests.unit.small_volume import small_volume

TASK = Mock(**{"config.training.memory_checkpoint_every_steps": 2, "layout.as_json.return_value": ""})
BYTES = 1 << 18
ROOM = 1 << 16  # for what is not a state
Job = Callable[..., None]


def train(rank: int, nodes: list[str], memory: Path, steps: list[int], resumes: int, cleaned: bool) -> None:
    """Resume from step `resumes` and save after `steps`; `cleaned`: something removes what is in memory before."""
    torch.set_num_threads(1)
    ranks = Ranks(rank, len(nodes), 0, dist.FileStore(str(memory.parent / "-".join(nodes)), len(nodes)))
    dist.init_process_group("gloo", store=ranks.store, rank=rank, world_size=len(nodes))
    state = {"weights": torch.full((BYTES,), -1, dtype=torch.uint8)}
    with node_memory(memory / nodes[rank], ranks) as directory:
        assert directory is not None
        checkpoints = MemoryCheckpoints(TASK, directory, ranks, torch.device("cpu"), state)
        newest = checkpoints.newest(0)
        assert (newest.progress.step if newest else 0) == resumes
        checkpoints.begin(newest, state)
        if newest:
            assert (state["weights"] == 10 * rank + resumes).all()
        assert len(list(directory.iterdir())) <= 8 and "(deleted)" not in mapped(memory)
        if cleaned:
            ranks.gather("begun", None)
            shutil.rmtree(memory, ignore_errors=True)
        for step in steps:
            state["weights"].fill_(10 * rank + step)
            checkpoints.save(TrainingProgress(step=step), state)
        checkpoints.finish()
        ranks.gather("saved", None)
        os._exit(0)  # as after a crash, the memory stays


def mapped(memory: Path) -> str:
    """What this process maps there."""
    return "".join(line for line in Path("/proc/self/maps").read_text().splitlines(True) if str(memory) in line)


def refused(*arguments: object) -> None:
    """A training that some rank's memory does not suffice for."""
    try:
        train(*arguments)  # type: ignore[arg-type]
    except UserError as error:
        os._exit(2 if "No space left on device; free" in str(error) else 1)


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / f"hyperpod-ft-{os.getuid()}-a"


def run(
    memory: Path,
    nodes: str,
    steps: list[int],
    *,
    resumes: int = 0,
    cleaned: bool = False,
    target: Job = train,
    status: int = 0,
) -> None:
    """A job of one rank on each of the nodes, which are letters."""
    (memory.parent / "-".join(nodes)).unlink(missing_ok=True)
    context = multiprocessing.get_context("fork")
    arguments = (list(nodes), memory, steps, resumes, cleaned)
    ranks = [context.Process(target=target, args=(rank, *arguments)) for rank in range(len(nodes))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # pytest has threads, which the forks do not need
        for rank in ranks:
            rank.start()
    for rank in ranks:
        rank.join(300)
        rank.kill()
    assert [rank.exitcode for rank in ranks] == [status] * len(ranks)


def test_no_node_has_more_than_two_states_of_two_ranks(memory: Path) -> None:
    """Wherever the new node comes in the order of nodes, by which ranks are numbered."""
    memory.mkdir(0o700)
    with small_volume(memory / "b", 4 * BYTES + ROOM), small_volume(memory / "c", 4 * BYTES + ROOM):
        run(memory, "abc", [2, 4])
        shutil.rmtree(memory / "a")
        run(memory, "bcd", [6, 8], resumes=4)
        shutil.rmtree(memory / "d")
        run(memory, "ebc", [], resumes=8)


def test_a_mark_without_its_state_is_no_checkpoint(memory: Path) -> None:
    run(memory, "ab", [2, 4])
    shutil.rmtree(memory / "b")
    (memory / "a" / "rank-00001.0").unlink()
    run(memory, "ab", [], resumes=2)
    run(memory, "ab", [], resumes=2)


def test_what_removes_the_memory_does_not_end_the_training(memory: Path) -> None:
    run(memory, "ab", [2, 4], cleaned=True)
    assert not memory.exists()


def test_a_node_with_too_little_memory_ends_all_which_free_theirs(memory: Path) -> None:
    memory.mkdir(0o700)
    with small_volume(memory / "b", 3 * BYTES):
        run(memory, "ab", [], target=refused, status=2)
        assert not (memory / "a").exists() and not list((memory / "b").iterdir())
