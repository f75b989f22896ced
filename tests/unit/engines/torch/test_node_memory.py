"""The directories of memory checkpoints in /dev/shm, which every user can write to."""

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from hyperpod_ft.engines.ranks import Interrupted, Ranks
from hyperpod_ft.engines.torch.memory_checkpoints import node_memory
from hyperpod_ft.errors import UserError

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


def test_what_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(0o700)
    open_to_all, link = job(tmp_path, "a"), job(tmp_path, "b")
    open_to_all.mkdir()
    link.symlink_to(tmp_path / "elsewhere")
    for directory in (open_to_all, link, tmp_path / "missing" / "a"):
        with (
            pytest.raises(UserError, match=r"^training\.memory_checkpoint_every_steps: .*leave the key out$"),
            node_memory(directory / "node1", ALONE),
        ):
            pass
    assert not list((tmp_path / "elsewhere").iterdir())


def test_what_no_job_uses_is_removed_after_an_hour(tmp_path: Path) -> None:
    used, left, restarting = (job(tmp_path, name) for name in ("used", "left", "restarting"))
    with node_memory(used / "node1", ALONE):
        for directory in (left, restarting):
            (directory / "node1").mkdir(parents=True)
        for path in (used / "node1", used, left / "node1", left):
            os.utime(path, (0, 0))
        with node_memory(job(tmp_path, "new") / "node1", ALONE):
            assert used.exists() and restarting.exists() and not left.exists()
