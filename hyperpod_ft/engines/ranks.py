"""The ranks of a training run, as torchrun started them, their store and their volumes, and how a signal stops them.

Slurm's scancel and time limit send a signal before they kill the job.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from hyperpod_ft.config.instances import CATALOGUE
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.job_files import NOTICE, STOP_SIGNALS

# Key-value waits that may take as long as another job's training: rank 0 may be waiting for the stage's lock.
NO_TIMEOUT = timedelta(days=30)
# Loading a large model from the shared volume, or writing a checkpoint, may keep one rank from a collective. When a job
# hangs, its watch (job/watch.py) ends it earlier.
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


def device_of(instance_type: str, local_rank: int) -> torch.device:
    """A rank's device, set as the current one; TorchNeuron's is set with the process group.

    Raises UserError if torch does not find the instance type's device.
    """
    kind = CATALOGUE[instance_type].device
    if kind == "cpu":
        # a restart must give the same bits; on accelerators some kernels have no deterministic version
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # its class has it
        return torch.device(kind)
    found = torch.accelerator.current_accelerator()
    if found is None or found.type != kind:
        raise UserError(
            f"cluster.instance_type: {instance_type} has device {kind}, but torch finds"
            f" {found.type if found else 'no accelerator'} here",
            "run on that instance type, with a torch built for it",
        )
    if kind != "neuron":
        torch.accelerator.set_device_index(local_rank)
    return torch.device(kind, local_rank)


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory in MB (1e6 bytes): the accelerator's, or this process's resident set on CPU."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated() / 1e6
    # ru_maxrss is in KiB on Linux, in bytes on macOS
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


class Interrupted(Exception):  # noqa: N818 - not an error
    """Training stopped at a step boundary because of a signal; as a rule, a checkpoint of that step was saved."""

    def __init__(self, step: int, signal_number: int, saved: bool = True) -> None:
        super().__init__(step, signal_number, saved)
        self.step = step
        self.signal_number = signal_number
        self.saved = saved

    def __str__(self) -> str:
        name = signal.Signals(self.signal_number).name
        if not self.saved:
            return (
                f"{name}: stopped after step {self.step}, without saving it (training.save_only_model):"
                " the next attempt starts again"
            )
        return f"{name}: stopped after step {self.step}, which is saved; run again to resume"

    @property
    def exit_status(self) -> int:
        """What a shell reports for a process killed by the signal."""
        return 128 + self.signal_number


@contextlib.contextmanager
def collect_signals() -> Iterator[list[int]]:
    """While the block runs, append arriving signals to the list instead of ending the process.

    After it, notices are ignored.
    """
    received: list[int] = []

    def append(number: int, _: FrameType | None) -> None:
        received.append(number)

    previous = {number: signal.signal(number, append) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            # a notice may come again; what it asks for is done, and its default action would end the process
            signal.signal(number, signal.SIG_IGN if number == NOTICE else handler)


def flags(received: Sequence[int]) -> list[float]:
    """A 1.0 for each of STOP_SIGNALS that this rank received, else 0.0: what ranks add up, for `stop_signal`."""
    return [float(known in received) for known in STOP_SIGNALS]


def stop_signal(sums: Sequence[float]) -> int:
    """The signal to stop for, from the sums of all ranks' `flags`; 0: no rank received one. SIGTERM comes first."""
    return int(max((known for known, ranks in zip(STOP_SIGNALS, sums, strict=True) if ranks), default=0))
