"""What the ranks of a tensor-parallel group exchange inside a model, each with its gradient.

Forward and backward are a pair: where one sums over the ranks, the other copies; where one gathers the parts of a
sequence, the other sums and divides it again (sequence parallelism: Korthikanti et al., arXiv:2205.05198, section
4.2.2). Sequences are dimension 1 of [rows, length, width]; rank r has the r-th of equal parts.
"""

from typing import Any

import torch
import torch.distributed as dist


class Copy(torch.autograd.Function):
    """The same on all ranks; backward sums the gradients (Megatron's `f`)."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return summed(gradient, ctx.group), None


class Sum(torch.autograd.Function):
    """Sum over the ranks; backward passes the gradient, which is the same on all, unchanged (Megatron's `g`)."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return summed(partial, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


class SumOfAll(torch.autograd.Function):
    """Sum over the ranks, of which each then computes something else: backward sums the gradients too."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return summed(partial, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return summed(gradient, ctx.group), None


class DivideSequence(torch.autograd.Function):
    """This rank's part of a sequence that all ranks have; backward gathers."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _own(whole, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _gathered(gradient, ctx.group), None


class JoinSequence(torch.autograd.Function):
    """The whole sequence, with which all ranks then compute the same; backward takes this rank's part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gathered(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _own(gradient, ctx.group), None


class GatherSequence(torch.autograd.Function):
    """The whole sequence, with which each rank then computes its share; backward sums, and takes this rank's part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gathered(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _summed_part(gradient, ctx.group), None


class SumSequence(torch.autograd.Function):
    """This rank's part of the sum over the ranks; backward gathers."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _summed_part(partial, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _gathered(gradient, ctx.group), None


def summed(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over the ranks, in new memory."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _own(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    length = whole.shape[1] // group.size()
    # contiguous: a view would keep the whole
    return whole.narrow(1, group.rank() * length, length).clone(memory_format=torch.contiguous_format)


def _gathered(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
    dist.all_gather_into_tensor(parts, part.contiguous(), group=group)
    return parts.unflatten(0, (group.size(), -1)).transpose(0, 1).flatten(1, 2)


def _summed_part(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = whole.unflatten(1, (group.size(), -1)).transpose(0, 1).contiguous()
    own = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(own, parts.flatten(0, 1), group=group)
    return own
