"""Collectives between the ranks of torchrun, by gloo, where upstream calls torch_xla's.

A group is given as torch_xla takes it: the ranks of every group of the mesh, [[0, 2], [1, 3]], of which this rank is
in one; or as a process group; None is all ranks.
"""

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm
from torch_xla.distributed import xla_backend

OPERATIONS = {
    xm.REDUCE_SUM: dist.ReduceOp.SUM,
    xm.REDUCE_MUL: dist.ReduceOp.PRODUCT,
    xm.REDUCE_MIN: dist.ReduceOp.MIN,
    xm.REDUCE_MAX: dist.ReduceOp.MAX,
}
Tensors = torch.Tensor | list[torch.Tensor]
_init_process_group = dist.init_process_group


def _init_gloo(*arguments: Any, backend: str | None = None, **options: Any) -> None:
    _init_process_group(*arguments, backend="gloo", **options)


@cache
def _of_mesh(mesh: tuple[tuple[int, ...], ...]) -> Any:
    """This rank's group. Every rank makes all of them, in the same order."""
    groups = [dist.new_group(list(ranks), backend="gloo") for ranks in mesh]
    return next(group for group, ranks in zip(groups, mesh, strict=True) if dist.get_rank() in ranks)


def _group(groups: Any) -> Any:
    if isinstance(groups, list | tuple):
        return _of_mesh(tuple(tuple(ranks) for ranks in groups))
    return groups


def all_reduce(
    reduce_type: Any, inputs: Tensors, scale: float = 1.0, groups: Any = None, pin_layout: bool = True
) -> Tensors:
    """Of a list in place, of one tensor a new one, as torch_xla does."""
    reduced = [inputs.detach().clone()] if isinstance(inputs, torch.Tensor) else list(inputs)
    for tensor in reduced:
        dist.all_reduce(tensor, op=OPERATIONS.get(reduce_type, reduce_type), group=_group(groups))
        if scale != 1.0:
            tensor.mul_(scale)
    return reduced[0] if isinstance(inputs, torch.Tensor) else reduced


def all_gather(
    value: Tensors, dim: int = 0, groups: Any = None, output: torch.Tensor | None = None, **_: Any
) -> Tensors:
    if not isinstance(value, torch.Tensor):
        return [all_gather(each, dim, groups) for each in value]  # type: ignore[misc]
    group = _group(groups)
    parts = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, value.contiguous(), group=group)
    return _into(output, torch.cat(parts, dim))


def reduce_scatter(
    reduce_type: Any,
    input: Tensors,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Any = None,
    output: torch.Tensor | None = None,
    **_: Any,
) -> Tensors:
    if not isinstance(input, torch.Tensor):
        return [reduce_scatter(reduce_type, each, scale, scatter_dim, shard_count, groups) for each in input]  # type: ignore[misc]
    whole = all_reduce(reduce_type, input, scale, groups)
    assert isinstance(whole, torch.Tensor)
    return _into(output, whole.chunk(shard_count, scatter_dim)[dist.get_rank(_group(groups))].contiguous())


def _into(output: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    return result if output is None else output.copy_(result)


def rendezvous(tag: str, payload: bytes = b"", replicas: object = None) -> list[bytes]:
    if dist.is_initialized():
        dist.barrier()
    return []


def install() -> None:
    xm.all_reduce, xm.all_gather, xm.reduce_scatter = all_reduce, all_gather, reduce_scatter
    xm.all_gather_bucketized, xm.reduce_scatter_bucketized = all_gather, reduce_scatter
    xm.rendezvous = rendezvous
    # optimum-neuron asks for backend xla, and looks whether it got it
    dist.init_process_group = dist.distributed_c10d.init_process_group = _init_gloo
    xla_backend.ProcessGroupXla = dist.ProcessGroup
    dist.new_group = xla_backend._orig_new_group_fn

    # neuronx-distributed's own way to gloo (`NXD_CPU_MODE`) has a reduce_scatter that returns nothing and an all_reduce
    # that takes process groups alone: it calls the functions above instead, as on a device
    from neuronx_distributed.parallel_layers import comm

    comm.cpu_mode = lambda: False
    comm._get_group_mesh = lambda groups: groups
