"""What the ranks of a tensor-parallel group exchange inside a model, each with its gradient, and how they drop out.

Forward and backward are a pair: where one sums over the ranks, the other copies; where one gathers the parts of a
sequence, the other sums and divides it again (sequence parallelism: Korthikanti et al., arXiv:2205.05198, section
4.2.2). Sequences are dimension 1 of [rows, length, width]; rank r has the r-th of equal parts.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# Torch 2.13 warns of the names that earlier releases have.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Exchange = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]


def _exchange(name: str, forward: Exchange, backward: Exchange) -> Exchange:
    """A function of a tensor and a group, with its gradient; `name` is what profilers show."""

    def keep(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return forward(tensor, group)

    def differentiate(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return backward(gradient, ctx.group), None

    methods = {"forward": staticmethod(keep), "backward": staticmethod(differentiate)}
    function: Any = type(name, (torch.autograd.Function,), methods)
    apply: Exchange = function.apply
    return apply


def _summed(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over the ranks, in new memory."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _same(tensor: torch.Tensor, _: dist.ProcessGroup) -> torch.Tensor:
    # a view: an autograd function must not return its input itself
    return tensor.view_as(tensor)


def _own(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    length = whole.shape[1] // group.size()
    # contiguous: a view would keep the whole
    return whole.narrow(1, group.rank() * length, length).clone(memory_format=torch.contiguous_format)


def _gathered(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
    all_gather(parts, part.contiguous(), group=group)
    rows: torch.Tensor = parts.unflatten(0, (group.size(), -1)).transpose(0, 1)
    return rows.flatten(1, 2)


def _summed_part(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = whole.unflatten(1, (group.size(), -1)).transpose(0, 1).contiguous()
    own = torch.empty_like(parts[0])
    reduce_scatter(own, parts.flatten(0, 1), group=group)
    return own


# the same on all ranks; backward sums the gradients (Megatron's `f`)
copy_to_ranks = _exchange("CopyToRanks", _same, _summed)
# backward passes the gradient, which is the same on all, unchanged (Megatron's `g`)
sum_over_ranks = _exchange("SumOverRanks", _summed, _same)
# a sum of which each rank then computes something else: backward sums the gradients too
sum_both_ways = _exchange("SumBothWays", _summed, _summed)
# this rank's part of a sequence that all ranks have; backward gathers
divide_sequence = _exchange("DivideSequence", _own, _gathered)
# the whole sequence, with which all ranks then compute the same; backward takes this rank's part
join_sequence = _exchange("JoinSequence", _gathered, _own)
# the whole sequence, with which each rank then computes its share; backward sums, and takes this rank's part
gather_sequence = _exchange("GatherSequence", _gathered, _summed_part)
# this rank's part of the sum over the ranks; backward gathers
sum_sequence = _exchange("SumSequence", _summed_part, _gathered)


def dropout_of_part(part: torch.Tensor, p: float, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """What `torch.nn.functional.dropout` makes of this rank's part, the parts of all being equal along `dim`.

    All ranks of a group draw the same random numbers, since most of what they drop out is the same on all of them. Of
    what is divided each draws the mask of the whole, and uses its own part: other elements have their own masks, and
    the generators of all ranks stay in one state, also where activations are computed again.
    """
    shape = list(part.shape)
    shape[dim] *= group.size()
    kept = torch.empty(shape, dtype=torch.bool, device=part.device).bernoulli_(1 - p)
    # cloned: the whole mask need not be kept for the backward pass
    own = kept.chunk(group.size(), dim)[group.rank()].clone(memory_format=torch.contiguous_format)
    return part * own * (1 / (1 - p))


def divide_dropout(dropout: nn.Dropout, group: dist.ProcessGroup, dim: int = 1) -> None:
    """Let a module drop out its rank's part of a tensor that is divided along `dim`, by default its positions."""
    module: Any = dropout
    module.__class__, module.group, module.dim = _DividedDropout, group, dim


class _DividedDropout(nn.Dropout):
    # a class: a compiler gives layers whose modules have their own forward functions a graph each
    group: dist.ProcessGroup
    dim: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return dropout_of_part(input, self.p, self.dim, self.group) if self.training and self.p else input
