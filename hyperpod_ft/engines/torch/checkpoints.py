"""Save and load sharded checkpoints with torch.distributed.checkpoint, each rank its part; complete or not at all."""

import contextlib
import hashlib
import io
import threading
from collections.abc import Collection, Generator, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

from hyperpod_ft import heartbeat, publish
from hyperpod_ft.engines.checkpoint_directory import CheckpointFile, delete_old, write_description
from hyperpod_ft.engines.interface import TrainingProgress, TrainingTask
from hyperpod_ft.engines.ranks import COLLECTIVE_TIMEOUT, Ranks, volume_of
from hyperpod_ft.engines.torch import devices
from hyperpod_ft.engines.torch.sharding.shards import Pieces
from hyperpod_ft.engines.torch.sharding.trained_weights import TrainedWeights
from hyperpod_ft.errors import UserError


class Checkpoints:
    """Writes the checkpoints of one attempt, each rank its part. Its methods are collective.

    With `training.async_save` the state is copied to host memory, and a thread writes it while training continues.
    """

    def __init__(self, task: TrainingTask, ranks: Ranks, device: torch.device, weights: TrainedWeights) -> None:
        """`weights`: what is saved; only its description is read."""
        self._task, self._device, self._weights = task, device, weights
        self.volume = volume_of(task.checkpoints, ranks)
        # a separate connection: what waits in a thread would make others of the same connection wait
        self._ranks = replace(ranks, store=ranks.store.clone())  # type: ignore[attr-defined] # all stores have it
        # a separate group: a thread's collectives must not mix with those of training, nor wait for the device
        self._group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        self._stager = Stager(pinned=devices.pins(device)) if task.config.training.async_save else None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @heartbeat.during("save")
    def save(self, final: Path, state: dict[str, Any], progress: TrainingProgress) -> None:
        """Write `state` as the checkpoint `final` of `progress.step`, in place of one before.

        If it is not the best one, delete those beyond `keep_checkpoints`.

        Without `async_save` the checkpoint has its final name when rank 0 returns, otherwise after `finish`. Raises
        UserError when this checkpoint, or the one before it, cannot be written.
        """
        self.finish()
        if self._stager is None:
            self._write(final, state, progress)
            return
        staged = self._stager.stage(state)
        # a daemon: after an error elsewhere the process must end, and an incomplete checkpoint does no harm
        self._thread = threading.Thread(target=self._write_in_thread, args=(final, staged, progress), daemon=True)
        self._thread.start()

    def load(self, directory: Path, state: dict[str, Any]) -> None:
        """Fill the tensors of `state` in place, each rank with its part."""
        dcp.load(state, storage_reader=dcp.FileSystemReader(directory), process_group=self._group)

    def names(self, directory: Path) -> Collection[str]:
        """The names of the tensors in a checkpoint whose index has been checked (newest_checkpoint.py)."""
        found: Mapping[str, Any] = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
        return found.keys()

    @heartbeat.during("save")
    def finish(self) -> None:
        """Wait for the checkpoint that a thread writes. Raises UserError when that fails."""
        if self._thread:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error:
            raise error

    def _write_in_thread(self, final: Path, state: dict[str, Any], progress: TrainingProgress) -> None:
        try:
            if self._device.index is not None:
                # a thread begins with device 0, where torch's writer would open a context for every rank
                torch.accelerator.set_device_index(self._device.index)
            self._write(final, state, progress)
        except BaseException as error:  # `finish` raises it
            self._error = error

    def _write(self, final: Path, state: dict[str, Any], progress: TrainingProgress) -> None:
        occasion = f"checkpoint/{final.name}/{progress.step}"
        with self._partial_directory(final) as partial:
            digests = self._write_files(state, partial)
            # DCP waited until every rank had written and synced its file
            own = {name: asdict(CheckpointFile.of(partial / name, digest)) for name, digest in sorted(digests.items())}
            gathered = self._ranks.gather(f"{occasion}/files", own)
            if self.volume.leads:
                files = {name: CheckpointFile(**file) for part in gathered for name, file in part.items()}
                weights = self._weights
                write_description(self._task, progress, partial, files, weights.held, weights.adapters)
        if self.volume.leads and final != self._task.best_checkpoint:
            delete_old(self._task, final, shared=self.volume.shared)
        # the others wait here, where the timeout is ours, and end with an error only when all is published
        self._ranks.gather(f"{occasion}/published", None)

    def _write_files(self, state: dict[str, Any], directory: Path) -> dict[str, str]:
        """Write this rank's file; return the SHA-256, by name, of the files that this rank wrote."""
        writer = _Writer(directory)
        try:
            dcp.save(state, storage_writer=writer, process_group=self._group)
        except CheckpointException as error:
            # every rank receives the failures of all; a full volume is not a bug
            for failure, _ in error.failures.values():
                if isinstance(failure, OSError):
                    raise UserError(
                        f"{directory.parent}: the checkpoint cannot be written: {failure.strerror}",
                        "free or repair the volume, then resume",
                    ) from failure
            raise
        return writer.digests

    @contextlib.contextmanager
    def _partial_directory(self, final: Path) -> Iterator[Path]:
        # one rank makes and publishes the directory under the name that the others on its volume write to
        if self.volume.leads:
            with publish.new_directory(final) as partial:
                dist.barrier(self._group)
                yield partial
        else:
            dist.barrier(self._group)
            yield publish.partial_of(final)


class _Writer(dcp.FileSystemWriter):
    """Computes digests while it writes, so that no file is read again.

    Raises the OSError that torch.save hides behind a RuntimeError, all that other ranks would receive.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.fs = self._hashing = _HashingFileSystem()

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256, by name, of the files written so far."""
        # the index is written under a temporary name
        return {name.removesuffix(".tmp"): file.digest for name, file in self._hashing.written.items()}

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().write_data(*args, **kwargs)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


class _HashingFileSystem(FileSystem):
    def __init__(self) -> None:
        self.written: dict[str, _HashingFile] = {}

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        with _HashingFile(Path(path)) as file:
            self.written[Path(path).name] = file
            yield file


class _HashingFile(io.BufferedWriter):
    """A file that is written from its beginning to its end."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.open("wb", buffering=0))
        self._sha256 = hashlib.sha256()

    @property
    def digest(self) -> str:
        return self._sha256.hexdigest()

    def write(self, data: Any) -> int:
        self._sha256.update(data)
        return super().write(data)

    def fileno(self) -> int:
        # what DCP flushes to disk by its number may still be in the buffer
        self.flush()
        return super().fileno()


class Stager:
    """Copies what this rank saves, into memory that it keeps for the next checkpoint.

    A rank's shard of a parameter is often a view of the whole: only the shard is copied, not the storage behind it.
    """

    def __init__(self, *, pinned: bool) -> None:
        """`pinned`: the tensors are on an accelerator, which copies into pinned memory without a copy in between."""
        self._pinned = pinned
        self._buffers: dict[tuple[tuple[str, ...], torch.dtype], torch.Tensor] = {}

    def stage(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state of nested dictionaries of tensors, copied to the CPU. The next call overwrites it."""
        staged: dict[str, Any] = self._staged(state, ())
        if self._pinned:
            torch.accelerator.synchronize()
        return staged

    @torch.no_grad()
    def _staged(self, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, Mapping):
            return {key: self._staged(inner, (*path, key)) for key, inner in value.items()}
        if isinstance(value, Pieces):
            # boxes of a rank never begin at the same element
            boxes = [(start, self._copy(values, (*path, str(start)))) for start, values in value.boxes]
            return Pieces(value.shape, value.dtype, torch.device("cpu"), boxes)
        return self._copy(value, path)

    def _copy(self, tensor: torch.Tensor, path: tuple[str, ...]) -> torch.Tensor:
        key = path, tensor.dtype
        if key not in self._buffers:
            self._buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self._pinned)
        return self._buffers[key].copy_(tensor, non_blocking=self._pinned)
