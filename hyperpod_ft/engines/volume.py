"""Which ranks manage a directory on a volume: one rank if all nodes share it, otherwise one on each node."""

import uuid
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ft.engines.ranks import Ranks


@dataclass(frozen=True)
class Volume:
    """How this rank sees a directory. `leads`: it makes, publishes and removes what is in it on its volume.

    `shared`: every rank sees the same directory. Otherwise each node has its own part of what ranks write, and nodes
    get the parts of others from somewhere else before training (launch/sagemaker/store/checkpoint_store.py).
    """

    leads: bool
    shared: bool


def find(ranks: Ranks, directory: Path) -> Volume:
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
