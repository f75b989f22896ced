"""A rank's part of each trained parameter: which elements it updates and saves, and who else holds the same.

tp divides a parameter first, then `dp_shard` divides the rows (dimension 0) of what a tp rank holds, as evenly as
whole rows allow: each rank gets ceil(rows / ranks), the last ones fewer or none. FSDP2 divides in the same way, so a
checkpoint has the same pieces in every mode.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True)
class Part:
    """Where this rank's part of a parameter lies in the whole."""

    shape: torch.Size  # of the whole parameter
    split: Shard | None  # over axis `tp`; None when each tp rank holds the same
    rows: int  # of dimension 0 on this rank's tp shard
    shard_ranks: int
    index: int  # of this rank among them
    mesh: DeviceMesh
    ends: dist.ProcessGroup | None = None
    """The ranks of a pipeline's first and last stage that both hold this part: of a tied embedding."""

    @property
    def rows_each(self) -> int:
        return math.ceil(self.rows / self.shard_ranks)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of its tp shard; a view."""
        start = min(self.index * self.rows_each, self.rows)
        return whole[start : start + self.rows_each]

    @property
    def copies(self) -> tuple[str, ...]:
        """The axes of the mesh along which ranks hold the same part."""
        return ("dp_replicate",) if self.split else ("dp_replicate", "tp")

    @property
    def replicas(self) -> int:
        """How many ranks hold the same part."""
        return math.prod(self.mesh[axis].size() for axis in self.copies) * (self.ends.size() if self.ends else 1)

    def wrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """A DTensor of the whole shape that shares this part's memory; the tensor itself when it is whole.

        The last dimension may be another than the parameter's, if it is not split.
        """
        divided = {"tp": self.split, "dp_shard": Shard(0) if self.shard_ranks > 1 else None}
        placements = {axis: placement for axis, placement in divided.items() if placement}
        if not placements:
            return tensor
        shape = list(self.shape)
        if tensor.ndim > 1:
            inner = self.split and self.split.dim == tensor.ndim - 1
            shape[-1] = tensor.shape[-1] * (self.mesh["tp"].size() if inner else 1)
        return DTensor.from_local(
            tensor,
            _mesh(self.mesh, tuple(placements), tensor.device.type),
            list(placements.values()),
            run_check=False,
            shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        )


def part(parameter: nn.Parameter, mesh: DeviceMesh) -> Part:
    """`parameter` is split over tp or not at all; on any device, also meta."""
    placement = parameter.placements[0] if isinstance(parameter, DTensor) else None
    return Part(
        shape=parameter.shape,
        split=placement if isinstance(placement, Shard) else None,
        rows=local(parameter).shape[0],
        shard_ranks=mesh["dp_shard"].size(),
        index=mesh.get_local_rank("dp_shard"),
        mesh=mesh,
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor; under no_grad it shares the DTensor's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def squared_norm(gradients: Mapping[str, torch.Tensor], parts: Mapping[str, Part]) -> torch.Tensor:
    """This rank's share of the squared norm of these parts' gradients, fp32 []: the sum over ranks is the full value.

    An element that n ranks hold counts 1/n on each.
    """
    by_replicas: dict[int, list[torch.Tensor]] = {}
    for name, gradient in gradients.items():
        by_replicas.setdefault(parts[name].replicas, []).append(gradient)
    shares = [
        torch.stack(torch._foreach_norm(some)).square().sum() / replicas for replicas, some in by_replicas.items()
    ]
    return torch.stack(shares).sum()


@torch.no_grad()
def sum_over(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum these tensors over the ranks of a group, in place, in one all-reduce."""
    if not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))


@torch.no_grad()
def check_replicas(
    tensors: Mapping[str, torch.Tensor], copies: Mapping[str, Iterable[str]], parts: Mapping[str, Part], step: int
) -> None:
    """Raise RuntimeError when a tensor differs between ranks along an axis of `copies`, by name. Collective.

    Such a difference means wrong gradients, and a checkpoint keeps only one rank's copy.
    """
    # exact in int64: a single changed bit changes it; several may cancel
    sums = {name: tensor.contiguous().view(torch.int16).sum(dtype=torch.int64) for name, tensor in tensors.items()}
    by_ranks: dict[tuple[str, dist.ProcessGroup], list[str]] = {}
    for name in tensors:
        mesh, ends = parts[name].mesh, parts[name].ends
        groups = [(f"{axis} ranks", mesh.get_group(axis)) for axis in copies[name] if mesh[axis].size() > 1]
        for ranks in [*groups, *([("the first and the last stage", ends)] if ends else [])]:
            by_ranks.setdefault(ranks, []).append(name)
    for (ranks, group), names in sorted(by_ranks.items(), key=lambda item: item[0][0]):
        device_type = parts[names[0]].mesh.device_type
        one = torch.stack([sums[name] for name in names]).to(device_type)
        both = torch.stack([one, -one])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
        if different := [name for name, low_high in zip(names, both.sum(0).tolist(), strict=True) if low_high]:
            raise RuntimeError(f"step {step}: {len(different)} parameters differ between {ranks}: {different[:3]}")


def _mesh(mesh: DeviceMesh, axes: tuple[str, ...], device_type: str) -> DeviceMesh:
    """The mesh of some axes, in this order and for tensors of this device type, with the process groups of `mesh`."""
    names = mesh.mesh_dim_names or ()
    here = mesh.mesh[tuple(slice(None) if name in axes else mesh.get_local_rank(name) for name in names)]
    ranks = here.permute([[name for name in names if name in axes].index(axis) for axis in axes])
    groups = [mesh.get_group(axis) for axis in axes]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks.contiguous(), mesh_dim_names=axes)
