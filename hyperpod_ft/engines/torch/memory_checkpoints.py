"""Memory checkpoints: every few steps, each rank's state in its node's memory, and a copy in that of the next node.

After the loss of ranks, or of one node, a job resumes from them instead of the volume. They are files in /dev/shm, so
that they outlive the ranks; each rank has two, which are written in turn:

    rank-00003.0        the state of rank 3, tensor after tensor
    rank-00003.0.json   of which step it is (`_Part`); not there while the file is written

One is written when all ranks have the other, so that a kill at any moment leaves a step that all have.
"""

import json
import math
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from hyperpod_ft import heartbeat
from hyperpod_ft.digests import text_sha256
from hyperpod_ft.engines.interface import TrainingProgress, TrainingTask
from hyperpod_ft.engines.ranks import COLLECTIVE_TIMEOUT, Ranks
from hyperpod_ft.engines.torch import devices
from hyperpod_ft.engines.torch.node_memory import shared_errors
from hyperpod_ft.engines.torch.sharding.shards import Pieces

_MESSAGE_BYTES = 1 << 30
_ALIGNMENT = 16  # of tensors in a file, in bytes: a multiple of every element's size


@dataclass(frozen=True)
class _Part:
    """A whole state of one rank after a step."""

    rank: int
    attempt: str  # that wrote it: on accelerators, the same step of two attempts may differ
    content: str  # digest of the layout, and of the tensors' names, shapes and dtypes
    bytes: int  # of its file
    progress: TrainingProgress


_PART = TypeAdapter(_Part)


@dataclass(frozen=True)
class MemoryCheckpoint:
    """A step that all ranks have in memory. `holders`: by rank, the nodes that have its state."""

    progress: TrainingProgress
    attempt: str
    holders: Mapping[int, list[str]]


class MemoryCheckpoints:
    """Those of one attempt. Its methods are collective."""

    def __init__(self, task: TrainingTask, directory: Path, ranks: Ranks, device: torch.device, state: Any) -> None:
        """`directory`: that of `node_memory`; `state`: nested dictionaries of tensors, as for all methods."""
        self._ranks, self._device, self._directory = ranks, device, directory
        self._every = task.config.training.memory_checkpoint_every_steps or 0
        leaves = list(_leaves(state))
        described = [self._every, task.layout.as_json(), [(name, *of.shape, str(of.dtype)) for name, of in leaves]]
        report = {
            "node": directory.name,
            "content": text_sha256(json.dumps(described)),
            "bytes": sum(_padded(tensor) for _, tensor in leaves),
            "attempt": uuid.uuid4().hex,
            "parts": [] if ranks.local_rank else [_PART.dump_python(part) for part in self._parts()],
        }
        self._reports = ranks.gather("memory/found", report)
        self._attempt = self._reports[0]["attempt"]
        self._nodes: dict[str, list[int]] = {}  # ranks, by their node's name
        for rank, of_rank in enumerate(self._reports):
            self._nodes.setdefault(of_rank["node"], []).append(rank)
        # of the nodes after and before this one, the ranks with this one's local number; this rank where it is alone
        names = list(self._nodes)
        at = names.index(directory.name)
        self._receiver, self._sender = (self._neighbor(names[(at + by) % len(names)]) for by in (1, -1))
        # a separate group: a thread's messages must not mix with those of training
        self._group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        self._files: dict[tuple[int, int], torch.Tensor] = {}  # the memory of those in use, by rank and slot
        self._removed = False  # whether somebody has removed the directory
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def newest(self, after: int) -> MemoryCheckpoint | None:
        """The newest step after `after` of which the nodes have all states, or None."""
        found: dict[tuple[int, str], dict[int, list[str]]] = {}
        progress = {}
        for node, ranks in self._nodes.items():
            for part in map(_PART.validate_python, self._reports[ranks[0]]["parts"]):
                if part.rank < len(self._reports) and part.content == self._reports[part.rank]["content"]:
                    key = (part.progress.step, part.attempt)
                    found.setdefault(key, {}).setdefault(part.rank, []).append(node)
                    progress[key] = part.progress  # equal on all ranks, but for the seconds
        whole = [key for key, holders in found.items() if len(holders) == len(self._reports) and key[0] > after]
        if not whole:
            return None
        key = max(whole)
        return MemoryCheckpoint(progress[key], key[1], found[key])

    def begin(self, resumed: MemoryCheckpoint | None, state: Any) -> None:
        """Fill `state` in place with what is resumed from, if anything; have the memory for all that will be kept.

        A rank whose own node lacks its state receives it. Raises UserError when a node has too little memory. At no
        time does a node have more than two states of each rank, own and received.
        """
        own = self._ranks.rank
        if resumed:
            slot = self._slot(resumed.progress)
            with shared_errors(self._ranks, "memory/older", self._directory):
                self._remove_unneeded(but=slot)
            with shared_errors(self._ranks, "memory/resumed", self._directory):
                self._memory(own, slot)
            self._receive(resumed)
            for view, tensor in self._pairs(slot, state):
                tensor.copy_(view)
        # what is mapped takes memory even when its file is removed
        self._files = {key: memory for key, memory in self._files.items() if key[0] in (own, self._sender)}
        dist.barrier(self._group)  # nobody reads what is removed now
        with shared_errors(self._ranks, "memory/sent", self._directory):
            self._remove_unneeded()
        with shared_errors(self._ranks, "memory/kept", self._directory):
            for rank in {own, self._sender}:
                for slot in (0, 1):
                    self._memory(rank, slot)

    def _remove_unneeded(self, but: int | None = None) -> None:
        """Remove the files of ranks whose states this node will not keep, except those of a slot. Raises OSError."""
        if self._ranks.local_rank:
            return
        ranks = (*self._nodes[self._directory.name], *self._nodes[self._reports[self._sender]["node"]])
        kept = {f"rank-{rank:05}" for rank in ranks}
        # marks first: none may be left without its state
        for file in sorted(self._directory.iterdir(), key=lambda file: file.suffix != ".json"):
            name, _, slot = file.name.partition(".")
            if name not in kept and not slot.startswith(str(but)):
                file.unlink()

    def is_due(self, step: int) -> bool:
        """Whether one is due after a step."""
        return step % self._every == 0

    @heartbeat.during("save")
    def save(self, progress: TrainingProgress, state: Any) -> None:
        """Copy the state after a step to memory; a thread then sends it to the next node."""
        self.finish()
        dist.barrier(self._group)  # all ranks have the other file
        slot = self._slot(progress)
        self._mark(self._ranks.rank, slot).unlink(missing_ok=True)
        for view, tensor in self._pairs(slot, state):
            view.copy_(tensor, non_blocking=devices.pins(self._device))
        if devices.pins(self._device):
            torch.accelerator.synchronize()
        self._write_mark(self._ranks.rank, self._attempt, progress)
        if self._sender != self._ranks.rank:
            self._thread = threading.Thread(target=self._replicate, args=(progress,), daemon=True)
            self._thread.start()

    @heartbeat.during("save")
    def finish(self) -> None:
        """Wait for the thread."""
        if self._thread:
            self._thread.join()
            self._thread = None
        if self._error:
            raise self._error

    def _replicate(self, progress: TrainingProgress) -> None:
        try:
            slot = self._slot(progress)
            self._mark(self._sender, slot).unlink(missing_ok=True)
            sent = self._begun(dist.isend, self._memory(self._ranks.rank, slot), self._receiver)
            for each in sent + self._begun(dist.irecv, self._memory(self._sender, slot), self._sender):
                each.wait()
            self._write_mark(self._sender, self._attempt, progress)
        except BaseException as error:  # `finish` raises it
            self._error = error

    def _receive(self, resumed: MemoryCheckpoint) -> None:
        """Have this rank's file, and send those that other nodes lack."""
        slot, work = self._slot(resumed.progress), []
        for rank, holders in sorted(resumed.holders.items()):
            if self._reports[rank]["node"] in holders:
                continue
            local = self._nodes[self._reports[rank]["node"]].index(rank)
            of_holder = self._nodes[holders[0]]
            sender = of_holder[local % len(of_holder)]
            if self._ranks.rank == sender:
                work += self._begun(dist.isend, self._memory(rank, slot), rank)
            elif self._ranks.rank == rank:
                self._mark(rank, slot).unlink(missing_ok=True)
                work += self._begun(dist.irecv, self._memory(rank, slot), sender)
        for each in work:
            each.wait()
        self._write_mark(self._ranks.rank, resumed.attempt, resumed.progress)

    def _begun(self, operation: Callable[..., dist.Work | None], memory: torch.Tensor, rank: int) -> list[dist.Work]:
        """Begin to send memory to a rank, or to receive it."""
        return [work for part in memory.split(_MESSAGE_BYTES) if (work := operation(part, rank, self._group))]

    def _neighbor(self, node: str) -> int:
        there = self._nodes[node]
        return there[self._ranks.local_rank % len(there)]

    def _slot(self, progress: TrainingProgress) -> int:
        """Of the two files of a rank, that for a step."""
        return progress.step // self._every % 2

    def _memory(self, rank: int, slot: int) -> torch.Tensor:
        """The memory of a file, uint8. Raises OSError when there is too little: a write would kill this process."""
        if (rank, slot) in self._files:
            return self._files[rank, slot]
        path, size = self._directory / f"rank-{rank:05}.{slot}", self._reports[rank]["bytes"]
        with path.open("ab") as file:
            if os.fstat(file.fileno()).st_size != size:
                self._mark(rank, slot).unlink(missing_ok=True)  # of a state that is lost
                file.truncate(size)
            os.posix_fallocate(file.fileno(), 0, size)
        memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        if rank == self._ranks.rank:
            devices.pin(memory, self._device)
        self._files[rank, slot] = memory
        return memory

    def _pairs(self, slot: int, state: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor's place in this rank's file, in its shape and dtype, and the tensor."""
        memory, begin = self._memory(self._ranks.rank, slot), 0
        for _, tensor in _leaves(state):
            own = memory[begin : begin + tensor.numel() * tensor.element_size()]
            yield own.view(tensor.dtype).view(tensor.shape), tensor
            begin += _padded(tensor)

    def _mark(self, rank: int, slot: int) -> Path:
        return self._directory / f"rank-{rank:05}.{slot}.json"

    def _write_mark(self, rank: int, attempt: str, progress: TrainingProgress) -> None:
        part = _Part(rank, attempt, self._reports[rank]["content"], self._reports[rank]["bytes"], progress)
        mark = self._mark(rank, self._slot(progress))
        partial = mark.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(asdict(part)))
            partial.replace(mark)
        except FileNotFoundError:  # training needs no memory checkpoint
            if not self._removed and self._ranks.local_rank == 0:
                print(f"train: {self._directory} was removed: no memory checkpoints until a restart", flush=True)
            self._removed = True

    def _parts(self) -> Iterator[_Part]:
        """What a killed attempt has left here."""
        for path in self._directory.glob("rank-*.json"):
            part, file = _PART.validate_json(path.read_bytes()), path.with_suffix("")
            if file.exists() and file.stat().st_size == part.bytes:
                yield part


def _leaves(state: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of this rank in nested dictionaries, always in the same order, each with a name of its own."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from _leaves(value, f"{name}.{key}")
    elif isinstance(state, Pieces):
        for start, box in state.boxes:
            yield from _leaves(box, f"{name}{start}")
    elif state.numel():
        yield name, state


def _padded(tensor: torch.Tensor) -> int:
    """Bytes that a tensor takes in a file."""
    return math.ceil(tensor.numel() * tensor.element_size() / _ALIGNMENT) * _ALIGNMENT
