"""The ranks of a training run, as torchrun started them, their store, and their volumes."""

import json
import os
import resource
import sys
import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hyperpod_ft.errors import UserError

# Key-value waits that may take as long as another job's training: rank 0 may be waiting for the stage's lock.
NO_TIMEOUT = timedelta(days=30)
# Loading a large model from the shared volume, or writing a checkpoint, may keep one rank from a collective.
COLLECTIVE_TIMEOUT = timedelta(minutes=60)


@dataclass(frozen=True)
class Ranks:
    """All ranks, seen from this process, which is one of them."""

    rank: int
    world_size: int
    local_rank: int
    store: dist.Store

    @property
    def is_rank_0(self) -> bool:
        """Rank 0 alone holds the lock, prints, and writes metrics and the record."""
        return self.rank == 0

    def gather(self, occasion: str, value: Any) -> list[Any]:
        """The JSON value of every rank, by rank. Collective: a barrier too.

        Uses the store, so that no device waits or compiles for it. `occasion` names this call, unique in a job. Rank 0
        returns last: with it, or soon after, the store ends.
        """
        keys = [f"{occasion}/{rank}" for rank in range(self.world_size)]
        self.store.set(keys[self.rank], json.dumps(value))
        if self.is_rank_0:
            self.store.wait(keys, COLLECTIVE_TIMEOUT)
            self.store.set(occasion, "[" + ",".join(self.store.get(key).decode() for key in keys) + "]")
        self.store.wait([occasion], COLLECTIVE_TIMEOUT)
        found: list[Any] = json.loads(self.store.get(occasion))
        self.store.set(f"{keys[self.rank]}/read", "")
        if self.is_rank_0:
            self.store.wait([f"{key}/read" for key in keys], COLLECTIVE_TIMEOUT)
        return found


@dataclass(frozen=True)
class Volume:
    """How this rank sees a directory. `leads`: it makes, publishes and removes what is in it on its volume.

    `shared`: every rank sees the same directory. Otherwise each node has its own part of what ranks write, and nodes
    get the parts of others from somewhere else before training (sagemaker/store/checkpoint_store.py).
    """

    leads: bool
    shared: bool


def volume_of(directory: Path, ranks: Ranks) -> Volume:
    """Look whether every node sees a file that rank 0 makes in `directory`. Collective; makes the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    # named like the leftovers of killed processes: docs/when-something-fails.md
    name = ranks.gather("volume/name", f".volume.partial-{uuid.uuid4().hex}")[0]
    probe = directory / name
    if ranks.is_rank_0:
        probe.touch()
    ranks.gather("volume/made", None)
    seen = ranks.gather("volume/seen", probe.exists())
    if ranks.is_rank_0:
        probe.unlink()
    shared = all(seen)
    return Volume(ranks.is_rank_0 or (not shared and ranks.local_rank == 0), shared)


def join_ranks(world_size: int) -> Ranks:
    """The ranks that torchrun started, or this process alone. Raises UserError when the run needs another number."""
    found = int(os.environ.get("WORLD_SIZE", "1"))
    if found != world_size:
        raise UserError(
            f"started as {found} process(es), but the run's nodes x ranks_per_node = {world_size}",
            f"start {world_size}: python -m torch.distributed.run --nnodes N --nproc-per-node P"
            " -m hyperpod_ft.stages.train RUN_DIR",
        )
    if "RANK" not in os.environ:
        return Ranks(0, 1, 0, dist.HashStore())
    store, rank, _ = next(dist.rendezvous("env://"))
    return Ranks(rank, world_size, int(os.environ.get("LOCAL_RANK", "0")), store)


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory in MB (1e6 bytes): the accelerator's, or this process's resident set on CPU."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated() / 1e6
    # ru_maxrss is in KiB on Linux, in bytes on macOS
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
