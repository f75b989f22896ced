"""Weights sharded layer by layer with FSDP2 (modes zero2 and zero3).

Gradients are reduce-scattered after every micro batch and accumulate sharded, in fp32; over `dp_replicate` they are
summed once a step. In zero2, layers are gathered in the first forward pass of a step and kept until its last backward
pass; in zero3, until they have been used, and gathered again for the backward pass. Embedding and output matrix are
kept from the forward pass to the backward pass in both.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

from hyperpod_ft.engines.torch import devices
from hyperpod_ft.engines.torch.sharding.shards import RankShard, check_replicas, local
from hyperpod_ft.engines.torch.sharding.trained_weights import HostMemory, TrainedWeights, in_buckets
from hyperpod_ft.planning.layout import Sharding


def shard_by_layer(
    module: nn.Module,
    stages: list[list[nn.Module]],
    mesh: DeviceMesh,
    sharding: Sharding,
    dtype: torch.dtype,
    others: Mapping[nn.Parameter, DeviceMesh],
) -> None:
    """Shard a module, and each of its layers, in place. Works on the meta device too.

    `stages`: its layers, in the groups that a forward pass computes; one unless it is part of a pipeline. `others`: the
    parameters that have another mesh. The module computes in `dtype`; gradients are reduced in fp32.
    """
    offload = sharding.offload == "parameters"
    # one object for all parameters of a mesh
    placed = {other: _placement(other) for other in set(others.values())}
    options: dict[str, Any] = {
        "mesh": _mesh_info(mesh).mesh,
        "shard_placement_fn": lambda parameter: placed[others[parameter]] if parameter in others else None,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=devices.pins(torch.device(mesh.device_type)))
        if offload
        else OffloadPolicy(),
    }
    # for small layers a collective costs nothing but latency
    for layers in stages:
        for bucket in in_buckets(layers, lambda layer: sum(p.nbytes for p in layer.parameters())):
            fully_shard(bucket, reshard_after_forward=sharding.mode == "zero3", **options)
    fully_shard(module, reshard_after_forward=False, **options)
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            # the loss is already divided by the tokens of all ranks: gradients are summed, not averaged
            submodule.set_gradient_divide_factor(1.0)
            submodule.set_force_sum_reduction_for_comms(True)


def _placement(mesh: DeviceMesh) -> Any:
    """What FSDP2 takes for parameters of another mesh, since torch 2.12; stage env refuses an older one."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult  # noqa: PLC0415

    return ShardPlacementResult(None, _mesh_info(mesh))


def _mesh_info(mesh: DeviceMesh) -> FSDPMeshInfo:
    if mesh["dp_replicate"].size() == 1:
        return FSDPMeshInfo(mesh["dp_shard"], shard_mesh_dim=0)
    return HSDPMeshInfo(mesh["dp_replicate", "dp_shard"], shard_mesh_dim=1, replicate_mesh_dim=0)


def reshard(module: nn.Module) -> None:
    """Release what is gathered of a module that `shard_by_layer` has sharded; any other stays as it is."""
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.reshard()


class ShardedWeights(TrainedWeights):
    """The trained parameters of a module that `shard_by_layer` has sharded; they are fp32."""

    def __init__(
        self,
        module: nn.Module,
        shards: Mapping[str, RankShard],
        mesh: DeviceMesh,
        sharding: Sharding,
        several_stages: bool = False,
    ) -> None:
        """`several_stages`: not all layers take part in a backward pass, since they are stages of a pipeline."""
        super().__init__(module, shards, mesh)
        assert isinstance(module, FSDPModule)
        self._module = module
        self._gather_once, self._several_stages = sharding.mode == "zero2", several_stages
        # names of parameters by the tensor-parallel ranks whose gradients add up
        self._summed: dict[dist.ProcessGroup, list[str]] = {}
        for name, shard in self.shards.items():
            if shard.split.sums:
                self._summed.setdefault(shard.split.sums, []).append(name)
        # 0 bytes on a rank without rows of it
        self.buckets = in_buckets(self.parameters, lambda name: local(self.parameters[name]).nbytes)
        if sharding.offload == "optimizer":
            self._host = HostMemory({name: self._shard(name) for name in self.parameters})

    def _shard(self, name: str) -> torch.Tensor:
        # looked up every time: FSDP may move its shards
        return local(self.parameters[name].detach())

    def master(self, name: str) -> torch.Tensor:
        return self._host.masters[name] if self._host else self._shard(name)

    def before_backward(self, last: bool) -> None:
        # each stage has its own last backward pass
        self._module.set_requires_all_reduce(last or self._several_stages)
        if self._gather_once:
            self._module.set_reshard_after_backward(last)

    @torch.no_grad()
    def after_backward(self) -> torch.Tensor:
        if self._gather_once and self._several_stages:
            reshard(self._module)
        gradients = {name: self._gradient(name) for name in self.parameters}
        for parameter in self.parameters.values():
            parameter.grad = None
        for group, names in self._summed.items():
            _sum_over([gradients[name] for name in names], group)
        for names in self.buckets:
            self._complete({name: gradients.pop(name) for name in names})
        return self._squared_norm()

    def _gradient(self, name: str) -> torch.Tensor:
        gradient = self.parameters[name].grad
        if gradient is None:
            return torch.zeros_like(self._shard(name))
        return self.shards[name].summand(local(gradient))

    @torch.no_grad()
    def use_masters(self, names: list[str]) -> None:
        if self._host:
            for name in names:
                self._shard(name).copy_(self._host.masters[name], non_blocking=True)

    def check_replicas(self, step: int) -> None:
        weights = {name: self._shard(name) for name in self.parameters}
        groups = {name: shard.replica_groups for name, shard in self.shards.items()}
        check_replicas(weights, groups, self.mesh.device_type, step)


@torch.no_grad()
def _sum_over(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum these tensors over the ranks of a group, in place, in one all-reduce."""
    if not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))
