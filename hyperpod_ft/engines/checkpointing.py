"""Save and load sharded checkpoints with torch.distributed.checkpoint: whole or not at all, each rank its part."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from hyperpod_ft import publish
from hyperpod_ft.engines.checkpoint_directory import DESCRIPTION, Progress, delete_old, describe, directory_of
from hyperpod_ft.run import Run


def save(run: Run, state: dict[str, Any], progress: Progress, rank: int) -> Path:
    """Write `state` as the checkpoint of `progress.step` and delete those beyond `keep_checkpoints`.

    Collective: every rank calls it. The checkpoint has its final name when rank 0 returns.
    """
    final = directory_of(run, progress.step)
    with _partial_directory(final, rank) as partial:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(partial))
        if rank == 0:
            # DCP has heard from every rank that its file is written and synced
            files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
            publish.write_json(partial / DESCRIPTION, describe(run, progress) | {"files": files})
    if rank == 0:
        delete_old(run)
    return final


@contextlib.contextmanager
def _partial_directory(final: Path, rank: int) -> Iterator[Path]:
    # rank 0 makes and publishes the directory under the name that the others write to
    if rank == 0:
        with publish.new_directory(final) as partial:
            dist.barrier()
            yield partial
    else:
        dist.barrier()
        yield final.with_name(f".{final.name}.partial")


def load(directory: Path, state: dict[str, Any]) -> None:
    """Fill the tensors of `state` in place, each rank with its part. Collective."""
    dcp.load(state, storage_reader=dcp.FileSystemReader(directory))


def random_state(rank: int, device: torch.device) -> dict[str, Any]:
    """This rank's generator states, for the checkpoint."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state()
    return {str(rank): states}


def restore_random_state(state: dict[str, Any], rank: int, device: torch.device) -> None:
    """Put back what `random_state` gave."""
    states = state[str(rank)]
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states["device"])
