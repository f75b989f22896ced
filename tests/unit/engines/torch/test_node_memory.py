"""Memory checkpoints: their directories in /dev/shm, which every user can write to, and which step all ranks have."""

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyperpod_ft.engines.interface import TrainingProgress
from hyperpod_ft.engines.ranks import Interrupted, Ranks
from hyperpod_ft.engines.torch.memory_checkpoints import MemoryCheckpoints
from hyperpod_ft.engines.torch.node_memory import node_memory
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.layout import Degrees, Layout, Sharding

ALONE = Ranks(0, 1, 0, dist.HashStore())


def job(tmp_path: Path, name: str) -> Path:
    return tmp_path / f"hyperpod-ft-{os.getuid()}-{name}"


def test_it_stays_after_a_crash_alone(tmp_path: Path) -> None:
    node = job(tmp_path, "a") / "node1"
    for error, stays in ((RuntimeError("crash"), True), (UserError("nan"), False), (Interrupted(3, 15), False)):
        with pytest.raises(type(error)), node_memory(node, ALONE):
            assert node.is_dir() and node.parent.stat().st_mode & 0o777 == 0o700
            raise error
        assert node.exists() == node.parent.exists() == stays


def test_what_others_may_have_made_is_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "elsewhere" / "node1").mkdir(parents=True)
    open_to_all, link, file = (job(tmp_path, name) for name in "abc")
    (open_to_all / "node1" / "rank-00000.0.json").mkdir(parents=True)
    open_to_all.chmod(0o755)
    link.symlink_to(tmp_path / "elsewhere")
    file.touch()
    with node_memory(open_to_all / "node1", ALONE) as made:
        assert made and not list(made.iterdir()) and open_to_all.stat().st_mode & 0o777 == 0o700
    for taken in (link, file):
        with node_memory(taken / "node1", ALONE) as made:
            assert made is None
        assert f"train: {taken} is not a directory of this user: no memory" in capsys.readouterr().out
        with pytest.raises(UserError), node_memory(taken / "node1", ALONE):
            raise UserError("nan")
    assert (tmp_path / "elsewhere" / "node1").exists()
    with (
        pytest.raises(UserError, match=r"^training\.memory_checkpoint_every_steps: .*leave the key out$"),
        node_memory(tmp_path / "missing" / "a" / "node1", ALONE),
    ):
        pass


def test_what_no_job_uses_is_removed_after_an_hour(tmp_path: Path) -> None:
    used, left, restarting = (job(tmp_path, name) for name in ("used", "left", "restarting"))
    with node_memory(used / "node1", ALONE):
        for directory in (left, restarting):
            (directory / "node1").mkdir(parents=True)
        for path in (used / "node1", used, left / "node1", left):
            os.utime(path, (0, 0))
        with node_memory(job(tmp_path, "new") / "node1", ALONE):
            assert used.exists() and restarting.exists() and not left.exists()


def test_what_a_lost_node_had_not_sent_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a job's two nodes the second is lost between its own mark of step 4 and that of its neighbour."""
    monkeypatch.setattr(dist, "new_group", lambda **_: None)
    layout = Layout(Degrees(2, 1, 1, 1), Sharding("replicated", 1))
    training = SimpleNamespace(memory_checkpoint_every_steps=2)
    task: Any = SimpleNamespace(config=SimpleNamespace(training=training), layout=layout)

    def start_on(*nodes: str) -> list[MemoryCheckpoints]:
        store, state = dist.HashStore(), {"weight": torch.zeros(1)}

        def checkpoints(rank: int) -> MemoryCheckpoints:
            ranks = Ranks(rank, 2, 0, store)
            return MemoryCheckpoints(task, tmp_path / nodes[rank], ranks, torch.device("cpu"), state)

        for node in nodes:
            (tmp_path / node).mkdir(exist_ok=True)
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(checkpoints, (0, 1)))

    kept, lost = start_on("node1", "node2")
    for node, rank, slot in product(("node1", "node2"), (0, 1), (0, 1)):
        (tmp_path / node / f"rank-{rank:05}.{slot}").write_bytes(bytes(16))
    for holder, rank, step in ((kept, 0, 2), (kept, 1, 2), (lost, 0, 2), (lost, 1, 2), (kept, 0, 4), (lost, 1, 4)):
        holder._write_mark(rank, "attempt", TrainingProgress(step))
    for checkpoints in start_on("node3", "node1"):
        newest = checkpoints.newest(after=0)
        assert newest and newest.progress.step == 2 and newest.holders == {0: ["node1"], 1: ["node1"]}
    kept._write_mark(1, "attempt", TrainingProgress(4))
    newest = start_on("node3", "node1")[0].newest(after=0)
    assert newest and newest.progress.step == 4, "it had arrived"
