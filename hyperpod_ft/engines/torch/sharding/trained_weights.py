"""What data-parallel ranks keep, share and exchange; hyperpod_ft.planning.torch.sharding describes the modes.

`TrainedWeights` is what the training loop and the optimizer see of it. Two mechanisms implement it: FSDP2, which shards
weights layer by layer (zero2, zero3), and whole weights with gradients summed in buckets (replicated, zero1).

Each rank updates its shard of every trained parameter. `masters` are these shards in fp32; they are the parameters' own
memory where that is fp32 and on the device, and copies otherwise.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hyperpod_ft.checkpoint.sharded.description import HeldParts, LoraDescription
from hyperpod_ft.engines.torch import devices
from hyperpod_ft.engines.torch.sharding.shards import RankShard, squared_norm
from hyperpod_ft.planning.layout import BUCKET_BYTES

_Item = TypeVar("_Item")


def in_buckets(items: Iterable[_Item], size_of: Callable[[_Item], int]) -> list[list[_Item]]:
    """Consecutive items, so that a bucket has at most BUCKET_BYTES or is one larger item; `size_of` one is in bytes."""
    buckets: list[list[_Item]] = []
    room = 0
    for item in items:
        size = size_of(item)
        if not buckets or size > room:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(item)
        room -= size
    return buckets


class TrainedWeights(ABC):
    """The gradients and trained parameters of a module on one rank."""

    def __init__(self, module: nn.Module, shards: Mapping[str, RankShard], mesh: DeviceMesh) -> None:
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.shards = {name: shards[name] for name in self.parameters}
        self.mesh = mesh
        self.stored_names: Mapping[str, str] = {}  # those in checkpoints, where they are not the module's
        self.held: HeldParts = {}  # as in held.json
        self.adapters: LoraDescription | None = None  # with method lora
        # names of parameters, in the order in which their gradients become known
        self.buckets: list[list[str]] = []
        self._gradients: dict[str, torch.Tensor] = {}
        self._tied: dict[str, torch.Tensor] = {}  # gradients that await those of a pipeline's other end
        self._squared_norms: list[torch.Tensor] = []
        self._host: HostMemory | None = None

    @abstractmethod
    def before_backward(self, last: bool) -> None:
        """Prepare for the backward pass of a micro batch; `last` of the step."""

    @abstractmethod
    def after_backward(self) -> torch.Tensor:
        """Complete the gradients of a step, after its last backward pass.

        Returns this rank's share of their squared norm, fp32 []: the sum over all ranks is the full value.
        """

    @abstractmethod
    def master(self, name: str) -> torch.Tensor:
        """This rank's shard of a trained parameter, fp32, plain; the optimizer updates it in place."""

    @abstractmethod
    def use_masters(self, names: list[str]) -> None:
        """Let the module compute with the masters of these parameters, after they changed."""

    @abstractmethod
    def check_replicas(self, step: int) -> None:
        """Raise RuntimeError when ranks that should hold the same weights differ. Collective."""

    def take_gradients(self, names: list[str]) -> list[torch.Tensor]:
        """The gradients of these shards, summed over all ranks, fp32, beside their masters; each can be taken once."""
        if self._host:
            self._host.wait(names)
        return [self._gradients.pop(name) for name in names]

    def state(self, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        """The masters by name, for checkpoints: Pieces where ranks hold different shards. In fp32 they share memory."""
        return {
            self.stored_names.get(name, name): self.shards[name].wrap(self.master(name).to(dtype))
            for name in self.parameters
        }

    def _complete(self, gradients: dict[str, torch.Tensor]) -> None:
        """Store final gradients; those of a tied embedding wait for the pipeline's other end.

        Their norm is computed on the device, before they may leave it.
        """
        # the two ends of a pipeline complete a step at different times: waiting for each other here would deadlock
        self._tied |= {name: gradients.pop(name) for name in [*gradients] if self.shards[name].ends}
        self._keep(gradients)

    def _keep(self, gradients: dict[str, torch.Tensor]) -> None:
        if gradients:
            self._squared_norms.append(squared_norm(gradients, self.shards))
            self._gradients |= self._host.receive(gradients) if self._host else gradients

    def _squared_norm(self) -> torch.Tensor:
        for name, gradient in self._tied.items():
            dist.all_reduce(gradient, group=self.shards[name].ends)
        self._keep(self._tied)
        self._tied = {}
        total = torch.stack(self._squared_norms).sum()
        self._squared_norms = []
        return total.to(self.mesh.device_type)


class HostMemory:
    """Masters and gradients in host memory, which an accelerator reaches without a copy in between (pinned)."""

    def __init__(self, masters: Mapping[str, torch.Tensor]) -> None:
        """Copies `masters`, which are on the device."""
        self.masters = {name: self._new(master).copy_(master) for name, master in masters.items()}
        self._gradients = {name: self._new(master) for name, master in masters.items()}
        self._received: dict[str, torch.Event] = {}

    @staticmethod
    def _new(like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=torch.float32, device="cpu", pin_memory=devices.pins(like.device))

    def receive(self, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Start to copy these gradients; `wait` before reading the result."""
        for name, gradient in gradients.items():
            self._gradients[name].copy_(gradient, non_blocking=True)
            if gradient.device.type != "cpu":
                event = torch.Event(gradient.device)
                event.record()
                self._received[name] = event
        return {name: self._gradients[name] for name in gradients}

    def wait(self, names: list[str]) -> None:
        for name in names:
            if event := self._received.pop(name, None):
                event.synchronize()
