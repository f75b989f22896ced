"""Save and load sharded checkpoints with torch.distributed.checkpoint, each rank its part; complete or not at all."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from hyperpod_ft import publish
from hyperpod_ft.checkpoint.sharded.dcp import INDEX
from hyperpod_ft.engines import checkpoint_directory
from hyperpod_ft.engines.checkpoint_directory import Progress, delete_old, describe
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.run import Run


def save(run: Run, state: dict[str, Any], progress: Progress, rank: int) -> Path:
    """Write `state` as the checkpoint of `progress.step` and delete those beyond `keep_checkpoints`.

    Collective: every rank calls it. The checkpoint has its final name when rank 0 returns.
    """
    final = run.checkpoint(progress.step)
    with _partial_directory(final, rank) as partial:
        _write(state, partial)
        # DCP waited until every rank had written and synced its file
        digests = _digests(partial, rank)
        if rank == 0:
            describe(run, progress, partial, digests)
    if rank == 0:
        delete_old(run, final)
    return final


def _write(state: dict[str, Any], directory: Path) -> None:
    try:
        dcp.save(state, storage_writer=_Writer(directory))
    except CheckpointException as error:
        # every rank receives the failures of all; a full volume is not a bug
        for failure, _ in error.failures.values():
            if isinstance(failure, OSError):
                raise UserError(
                    f"{directory.parent}: the checkpoint cannot be written: {failure.strerror}",
                    "free or repair the volume, then resume",
                ) from failure
        raise


class _Writer(dcp.FileSystemWriter):
    """Raises the OSError that torch.save hides behind a RuntimeError, all that other ranks would receive."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().write_data(*args, **kwargs)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def _digests(directory: Path, rank: int) -> dict[str, str]:
    """SHA-256 of every file, by name. Each rank reads the files that it wrote, rank 0 the index too. Collective."""
    own = [path for path in directory.iterdir() if path.name.startswith(f"__{rank}_")]
    if rank == 0:
        own.append(directory / INDEX)
    found = _gather({path.name: publish.sha256(path) for path in own})
    return {name: digest for part in found for name, digest in sorted(part.items())}


def _gather(mine: Any) -> list[Any]:
    """The value of every rank, by rank. Collective."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


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


def newest(run: Run, rank: int) -> Progress | None:
    """The progress of the newest checkpoint that is complete and undamaged; prints why it ignores others.

    Collective: rank 0 chooses, and every rank reads a part of the files.
    """
    candidates = checkpoint_directory.complete(run) if rank == 0 else iter(())
    while True:
        found: Progress | None = _gather(next(candidates, None))[0]
        if found is None:
            return None
        directory = run.checkpoint(found.step)
        reasons = _gather(checkpoint_directory.damaged(directory, rank, dist.get_world_size()))
        if not any(reasons):
            return found
        if rank == 0:
            checkpoint_directory.print_ignored(directory, next(filter(None, reasons)))


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
    """Restore the generator states that `random_state` returned."""
    states = state[str(rank)]
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states["device"])
