"""Dropout of tensors that are divided over tensor-parallel ranks: masks are those of one rank that has the whole.

All ranks of a group draw the same random numbers, since most of what they drop out is the same on all of them. Of what
is divided each draws the mask of the whole, and uses its own part: other elements have their own masks, and the
generators of all ranks stay in one state, also where activations are computed again.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_SEQUENCE = 1


def dropout_of_part(part: torch.Tensor, p: float, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """What `torch.nn.functional.dropout` makes of this rank's part, the parts of all being equal along `dim`."""
    shape = list(part.shape)
    shape[dim] *= group.size()
    kept = torch.empty(shape, dtype=torch.bool, device=part.device).bernoulli_(1 - p)
    # cloned: the whole mask need not be kept for the backward pass
    own = kept.chunk(group.size(), dim)[group.rank()].clone(memory_format=torch.contiguous_format)
    return part * own * (1 / (1 - p))


def divide(dropout: nn.Dropout, group: dist.ProcessGroup, dim: int = _SEQUENCE) -> None:
    """Let a module drop out its rank's part of a tensor that is divided along `dim`, by default its positions."""
    module: Any = dropout
    module.__class__, module.group, module.dim = _DividedDropout, group, dim


class _DividedDropout(nn.Dropout):
    # a class: a compiler gives layers whose modules have their own forward functions a graph each
    group: dist.ProcessGroup
    dim: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return dropout_of_part(input, self.p, self.dim, self.group) if self.training and self.p else input
