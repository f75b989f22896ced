"""A rank's shard of each parameter: which elements it holds, updates and saves, and who else holds the same.

tp divides a parameter first, or ep one of experts; then `dp_shard` divides the rows (dimension 0) of what a tp or ep
rank holds, as evenly as whole rows allow: each rank gets ceil(rows / ranks), the last ones fewer or none. FSDP2 divides
in the same way, so a checkpoint has the same pieces in every mode.

Checkpoints save and load shards as `Pieces`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hyperpod_ft.engines.torch import devices

Box = tuple[tuple[int, ...], torch.Tensor]
"""Some elements of a tensor: where they begin in the whole, and their values."""


class Pieces(torch.Tensor):
    """A tensor of which this rank has some boxes, as torch.distributed.checkpoint saves and loads it.

    The three methods are its protocol (torch/distributed/_checkpointable.py). Unlike a DTensor, the boxes of a rank can
    lie anywhere.
    """

    boxes: list[Box]

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device, boxes: list[Box]) -> "Pieces":
        made: Pieces = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.boxes = boxes
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise TypeError(f"{func} is not defined for a part of a tensor")

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(start), sizes=values.shape)
            for start, values in self.boxes
            if values.numel()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(values for start, values in self.boxes if torch.Size(start) == index.offset)


@dataclass(frozen=True)
class TensorSplit:
    """What tensor or expert parallelism makes of a parameter: whole on each rank, or split along dimension `dim`."""

    shape: torch.Size  # of the whole parameter
    dim: int | None = None  # None: each rank holds it whole
    ranges: tuple[range, ...] = ()  # of `dim`, what this rank has, in its order
    index: int = 0  # of this rank in its group of such ranks
    ranks: int = 1  # of that group
    sums: dist.ProcessGroup | None = None  # sum gradients over this group; None: each rank has the full gradient
    share: float = 1.0  # of the gradient that a rank computes, in that sum

    @property
    def length(self) -> int:
        """Of what this rank has, along `dim`."""
        return sum(map(len, self.ranges))

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """What this rank has of a parameter that is split, copied; on the meta device too."""
        assert self.dim is not None
        slices = [whole.narrow(self.dim, own.start, len(own)) for own in self.ranges]
        return torch.cat(slices, self.dim)


@dataclass(frozen=True)
class RankShard:
    """Where this rank's shard of a parameter lies in the whole."""

    split: TensorSplit
    rows: int  # of dimension 0 on this tp or ep rank
    shard_ranks: int
    index: int  # of this rank among them
    mesh: DeviceMesh  # of the weights, or of experts where these are divided
    ends: dist.ProcessGroup | None = None  # of a tied embedding: the ranks of a pipeline's two ends, which both hold it

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole parameter."""
        return self.split.shape

    @property
    def rows_each(self) -> int:
        return math.ceil(self.rows / self.shard_ranks)

    @property
    def first_row(self) -> int:
        return min(self.index * self.rows_each, self.rows)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of what its tp or ep rank holds; a view."""
        return whole[self.first_row : self.first_row + self.rows_each]

    @property
    def unsharded(self) -> "RankShard":
        """What this tp or ep rank holds, all rows of it."""
        return replace(self, shard_ranks=1, index=0)

    @property
    def replica_groups(self) -> dict[str, dist.ProcessGroup]:
        """The groups of ranks that hold the same shard, by their axis."""
        found = {"dp_replicate": self.mesh.get_group("dp_replicate")}
        if self.split.dim is None:
            found["tp"] = self.mesh.get_group("tp")
        elif self.split.sums:  # of a split parameter: the ranks that have the same slice
            found["tp copies"] = self.split.sums
        if self.ends:
            found["first and last pipeline"] = self.ends
        return found

    def summand(self, gradient: torch.Tensor) -> torch.Tensor:
        """What this rank adds to the sum over `split.sums`."""
        return gradient if self.split.share == 1 else gradient * self.split.share

    @property
    def replicas(self) -> int:
        """How many ranks hold the same shard."""
        return math.prod(group.size() for group in self.replica_groups.values())

    def boxes(self, tensor: torch.Tensor) -> list[Box]:
        """Where this shard's values, given as `tensor`, lie in the whole; views.

        Their last dimension may differ from the parameter's: moments in 8 bits have one scale for a block of a row.
        """
        start = (self.first_row, *[0] * (tensor.ndim - 1))
        split, dim = self.split, self.split.dim
        if dim is None:
            return [(start, tensor)]
        ranges = split.ranges
        if dim == tensor.ndim - 1 > 0 and tensor.shape[-1] != split.length:
            ranges = (range(split.index * tensor.shape[-1], (split.index + 1) * tensor.shape[-1]),)
        found: list[Box] = []
        first = 0  # of this range in what the tp rank holds
        begins = start[dim]
        for own in ranges:
            low, high = max(first, begins), min(first + len(own), begins + tensor.shape[dim])
            if low < high:
                place = (*start[:dim], own.start + low - first, *start[dim + 1 :])
                found.append((place, tensor.narrow(dim, low - begins, high - low)))
            first += len(own)
        return found

    def wrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """This shard's values for a checkpoint, sharing their memory; the tensor itself when it is whole."""
        split = self.split
        if split.dim is None and self.shard_ranks == 1:
            return tensor
        shape = list(self.shape)
        if tensor.ndim > 1:
            if split.dim != tensor.ndim - 1:
                shape[-1] = tensor.shape[-1]
            elif tensor.shape[-1] != split.length:
                shape[-1] = tensor.shape[-1] * split.ranks
        return Pieces(torch.Size(shape), tensor.dtype, tensor.device, self.boxes(tensor))


def shards_of(
    parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh, splits: Mapping[str, TensorSplit]
) -> dict[str, RankShard]:
    """This rank's shard of each parameter, by FQN; before FSDP2 shards them, on any device.

    `splits`: of those that tensor or expert parallelism changes.
    """
    # once, not for each parameter: a mesh takes milliseconds to answer
    shard_ranks, index = mesh["dp_shard"].size(), mesh.get_local_rank("dp_shard")
    return {
        name: RankShard(
            split=splits.get(name, TensorSplit(parameter.shape)),
            rows=parameter.shape[0],
            shard_ranks=shard_ranks,
            index=index,
            mesh=mesh,
        )
        for name, parameter in parameters.items()
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor that FSDP2 has sharded; under no_grad it shares the DTensor's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def squared_norm(gradients: Mapping[str, torch.Tensor], shards: Mapping[str, RankShard]) -> torch.Tensor:
    """This rank's share of the squared norm of these shards' gradients, fp32 []: the sum over ranks is the full value.

    An element that n ranks hold counts 1/n on each.
    """
    by_replicas: dict[int, list[torch.Tensor]] = {}
    for name, gradient in gradients.items():
        by_replicas.setdefault(shards[name].replicas, []).append(gradient)
    shares = [
        torch.stack(torch._foreach_norm(some)).square().sum() / replicas for replicas, some in by_replicas.items()
    ]
    return torch.stack(shares).sum()


@torch.no_grad()
def check_replicas(
    tensors: Mapping[str, torch.Tensor],
    replica_groups: Mapping[str, Mapping[str, dist.ProcessGroup]],
    device_type: str,
    step: int,
) -> None:
    """Raise RuntimeError when a tensor differs within one of its groups, `replica_groups` by name and axis. Collective.

    Such a difference means wrong gradients, and a checkpoint keeps only one rank's copy.
    """
    sums = {name: _sum_of_bits(tensor) for name, tensor in tensors.items()}
    # experts have groups of their own along the axes of the same names
    groups = dict.fromkeys(of for name in tensors for of in replica_groups[name].items() if of[1].size() > 1)
    for axis, group in groups:
        names = [name for name in tensors if replica_groups[name].get(axis) is group]
        one = torch.stack([sums[name] for name in names])
        # quarters of 16 bits, which any device exchanges exactly
        quarters = (one[:, None] >> torch.arange(0, 64, 16, device=one.device) & 0xFFFF).float().to(device_type)
        both = torch.stack([quarters, -quarters])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
        if different := [name for name, spread in zip(names, both.sum((0, 2)).tolist(), strict=True) if spread]:
            raise RuntimeError(f"step {step}: {len(different)} parameters differ between {axis} ranks: {different[:3]}")


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """An int64 [] that a single changed bit changes; the changes of several may cancel."""
    if devices.fixed_shapes(tensor.device):
        tensor = tensor.cpu()  # the device would add with 32 bits
    return tensor.contiguous().view(torch.int16).sum(dtype=torch.int64)
