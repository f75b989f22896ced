"""Whole weights on every data-parallel rank (modes replicated and zero1).

Gradients accumulate in `.grad`, in fp32, over the micro batches of a step. In the last backward pass they are summed
in buckets, each as soon as its gradients are complete: a reduce-scatter over `dp_shard`, then an all-reduce over
`dp_replicate`, and over the tensor-parallel ranks that each saw only a share of it. A rank then updates its shard and
gathers those of the others. In mode replicated `dp_shard` has one rank, so that a shard is the whole and nothing is
gathered. On one rank nothing is copied or exchanged at all.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hyperpod_ft.engines.torch.sharding.shards import RankShard, check_replicas
from hyperpod_ft.engines.torch.sharding.trained_weights import HostMemory, TrainedWeights, in_buckets
from hyperpod_ft.engines.torch.tensor_collectives import all_gather, reduce_scatter


class _Bucket:
    """Parameters that are exchanged in one buffer of one row for each shard rank; `shards` in the order of its columns.

    A row holds that rank's shards, one after another, each with room for the largest shard of that parameter.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], shards: dict[str, RankShard]) -> None:
        self.parameters, self.shards = parameters, shards
        first = next(iter(shards.values()))
        self._mesh = first.mesh
        self._shard_ranks = self._mesh["dp_shard"].size()
        # to sum over, beside dp_shard
        groups = (self._mesh.get_group("dp_replicate"), first.split.sums)
        self._summing_groups = [group for group in groups if group and group.size() > 1]
        self._columns: dict[str, tuple[int, int]] = {}  # first column and width of each parameter
        self._width = 0
        for name, parameter in parameters.items():
            width = shards[name].rows_each * parameter[:1].numel()
            self._columns[name] = (self._width, width)
            self._width += width
        self.waiting = 0  # parameters whose gradient is not complete yet

    @property
    def communicates(self) -> bool:
        return self._shard_ranks > 1 or bool(self._summing_groups)

    @torch.no_grad()
    def reduce(self) -> dict[str, torch.Tensor]:
        """The summed gradients of this rank's shards, fp32; drops the parameters' own."""
        gradients = {name: self.shards[name].summand(_gradient(p)) for name, p in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.grad = None
        if not self.communicates:
            return gradients
        first = next(iter(gradients.values()))
        buffer = first.new_zeros(self._shard_ranks, self._width)
        pairs = [pair for name, gradient in gradients.items() for pair in self._chunks(buffer, name, gradient)]
        torch._foreach_copy_([view for view, _ in pairs], [chunk for _, chunk in pairs])
        # their memory is not needed while the buffer is reduced
        del pairs, first
        gradients.clear()
        own = buffer[0]
        if self._shard_ranks > 1:
            own = torch.empty_like(buffer[0])
            reduce_scatter(own, buffer.view(-1), group=self._mesh.get_group("dp_shard"))
        for group in self._summing_groups:
            dist.all_reduce(own, group=group)
        return dict(self._shards_of(own))

    @torch.no_grad()
    def gather(self) -> None:
        """Fill the parameters with the shards that their ranks have updated."""
        if self._shard_ranks == 1:
            return
        weights = {name: parameter.detach() for name, parameter in self.parameters.items()}
        first = next(iter(weights.values()))
        own = first.new_zeros(self._width)
        for name, view in self._shards_of(own):
            view.copy_(self.shards[name].take(weights[name]))
        buffer = first.new_empty(self._shard_ranks, own.numel())
        all_gather(buffer.view(-1), own, group=self._mesh.get_group("dp_shard"))
        pairs = [pair for name, weight in weights.items() for pair in self._chunks(buffer, name, weight)]
        torch._foreach_copy_([chunk for _, chunk in pairs], [view for view, _ in pairs])

    def _shards_of(self, row: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The views of a row that this rank's shards take up."""
        for name, parameter in self.parameters.items():
            start, _ = self._columns[name]
            shape = self.shards[name].take(parameter.detach()).shape
            yield name, row[start : start + shape.numel()].view(shape)

    def _chunks(
        self, buffer: torch.Tensor, name: str, tensor: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of the buffer and of a whole tensor that correspond: of the full shards, and of the last one."""
        start, width = self._columns[name]
        flat = tensor.view(-1)
        full, rest = divmod(flat.numel(), width)
        yield buffer[:full, start : start + width], flat[: full * width].view(full, width)
        if rest:
            yield buffer[full, start : start + rest], flat[full * width :]


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter.detach(), dtype=torch.float32)
    return parameter.grad.contiguous()


class ReplicatedWeights(TrainedWeights):
    """Trained parameters are whole on each data-parallel rank, in the dtype in which they compute.

    Those in fp32 are their own masters, unless the masters are in host memory.
    """

    def __init__(
        self,
        module: nn.Module,
        shards: Mapping[str, RankShard],
        mesh: DeviceMesh,
        offload: bool,
    ) -> None:
        """The trained parameters must be on the device. Masters begin with their values."""
        super().__init__(module, shards, mesh)
        own = {name: shards[name].take(p.detach()) for name, p in self.parameters.items()}
        if offload:
            self._host = HostMemory(own)
            self._masters = self._host.masters
        else:
            self._masters = {name: tensor.float() for name, tensor in own.items()}
        self._separate = {name for name, p in self.parameters.items() if offload or p.dtype != torch.float32}
        for parameter in self.parameters.values():
            parameter.grad_dtype = torch.float32
        self._reductions = _reductions(self.parameters, self.shards)
        self.buckets = [list(bucket.parameters) for bucket in self._reductions]
        self._last = False
        self._reduced = 0  # buckets of this step
        self._stream: torch.Stream | None = None
        if offload or any(bucket.communicates for bucket in self._reductions):
            if mesh.device_type == "cuda":
                self._stream = torch.Stream(mesh.device_type)
            for bucket in self._reductions:
                for parameter in bucket.parameters.values():
                    parameter.register_post_accumulate_grad_hook(self._on_gradient(bucket))

    def master(self, name: str) -> torch.Tensor:
        return self._masters[name]

    def before_backward(self, last: bool) -> None:
        self._last, self._reduced = last, 0
        for bucket in self._reductions:
            bucket.waiting = len(bucket.parameters)

    def after_backward(self) -> torch.Tensor:
        # those with parameters that had no gradient
        for bucket in self._reductions:
            bucket.waiting = 0
        self._reduce_complete()
        if self._stream:
            torch.accelerator.current_stream().wait_stream(self._stream)
        return self._squared_norm()

    @torch.no_grad()
    def use_masters(self, names: list[str]) -> None:
        for name in names:
            if name in self._separate:
                own = self.shards[name].take(self.parameters[name].detach())
                own.copy_(self._masters[name], non_blocking=True)
        for bucket in self._reductions:
            if names[0] in bucket.parameters:
                bucket.gather()

    def check_replicas(self, step: int) -> None:
        groups = {
            name: shard.replica_groups | {"dp_shard": shard.mesh.get_group("dp_shard")}
            for name, shard in self.shards.items()
        }
        weights = {name: p.detach() for name, p in self.parameters.items()}
        check_replicas(weights, groups, self.mesh.device_type, step)

    def _on_gradient(self, bucket: _Bucket) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            if self._last:
                bucket.waiting -= 1
                self._reduce_complete()

        return hook

    def _reduce_complete(self) -> None:
        """Reduce the buckets whose gradients are complete, in their order, which is the same on all ranks.

        On CUDA on a separate stream, beside the backward pass.
        """
        while self._reduced < len(self._reductions) and not self._reductions[self._reduced].waiting:
            bucket = self._reductions[self._reduced]
            self._reduced += 1
            if self._stream is None:
                self._complete(bucket.reduce())
                continue
            self._stream.wait_stream(torch.accelerator.current_stream())
            for parameter in bucket.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.record_stream(self._stream)
            with self._stream:
                self._complete(bucket.reduce())


def _reductions(parameters: dict[str, nn.Parameter], shards: dict[str, RankShard]) -> list[_Bucket]:
    """The buckets in the order in which a backward pass completes them, which is about that of the parameters reversed.

    Vectors have their own buckets: a norm comes after its layer's matrices in the order of parameters, but before
    them in the forward pass. So have divided experts, which other ranks share, and each dtype: a model's class may keep
    some tensors in fp32, and a bucket is gathered in one dtype.
    """
    position = {name: index for index, name in enumerate(reversed(parameters))}
    by_kind: dict[tuple[DeviceMesh, dist.ProcessGroup | None, bool, torch.dtype], list[str]] = {}
    for name in position:
        shard, parameter = shards[name], parameters[name]
        kind = shard.mesh, shard.split.sums, parameter.ndim == 1, parameter.dtype
        by_kind.setdefault(kind, []).append(name)
    made = [
        names
        for alike in by_kind.values()
        for names in in_buckets(alike, lambda name: parameters[name].numel() * torch.float32.itemsize)
    ]
    made.sort(key=lambda names: position[names[-1]])
    return [
        _Bucket({name: parameters[name] for name in names}, {name: shards[name] for name in names}) for names in made
    ]
