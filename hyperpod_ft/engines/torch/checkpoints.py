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
from hyperpod_ft.engines.checkpoint_directory import Progress, delete_old, write_description
from hyperpod_ft.engines.processes import Processes
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.run import Run


def save(run: Run, state: dict[str, Any], progress: Progress, processes: Processes) -> Path:
    """Write `state` as the checkpoint of `progress.step` and delete those beyond `keep_checkpoints`.

    Collective: every rank calls it. The checkpoint has its final name when rank 0 returns.
    """
    final, rank = run.checkpoint(progress.step), processes.rank
    with _partial_directory(final, rank) as partial:
        _write(state, partial)
        # DCP waited until every rank had written and synced its file
        gathered = processes.gather(f"checkpoint/{progress.step}/digests", _digests(partial, rank))
        if rank == 0:
            digests = {name: digest for part in gathered for name, digest in sorted(part.items())}
            write_description(run, progress, partial, digests)
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
    """SHA-256, by name, of the files that this rank wrote; on rank 0 of the index too."""
    own = [path for path in directory.iterdir() if path.name.startswith(f"__{rank}_")]
    if rank == 0:
        own.append(directory / INDEX)
    return {path.name: publish.sha256(path) for path in own}


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
    """Restore the generator states that `random_state` returned."""
    states = state[str(rank)]
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states["device"])
