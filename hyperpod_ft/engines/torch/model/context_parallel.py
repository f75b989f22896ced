"""Context parallelism: the ranks of axis `cp` share the tokens of each row, and attention exchanges tokens for heads.

DeepSpeed-Ulysses (Jacobs et al., arXiv:2309.14509, section 3.1). Everything but attention treats each token by itself,
so a rank computes it for its own part of every row. For attention, an all-to-all gives the rank all tokens of the row
for its share of the heads, and another one gives it all heads of its own tokens back. Each head's attention is thus
computed in one place, by the same kernels and within the same documents as without.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface

from hyperpod_ft.engines.torch.model import attention
from hyperpod_ft.planning.layout import copies_over_context


@dataclass(frozen=True)
class SequenceChunk:
    """The part of every row that a rank computes: of `count` equal ones the one with number `index`, from 0."""

    index: int = 0
    count: int = 1

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, length] to [rows, length / count]; a view."""
        return rows.chunk(self.count, dim=1)[self.index]


def chunk_of(ranks: DeviceMesh) -> SequenceChunk:
    """This rank's part; `ranks` is axis `cp`."""
    return SequenceChunk(ranks.get_local_rank(), ranks.size())


def divide_attention(ranks: DeviceMesh) -> None:
    """Let the attention of this process's models exchange with the ranks of axis `cp`, if there are several."""
    AttentionInterface.register(
        attention.NAME, attention.attend if ranks.size() == 1 else _AttentionOverRanks(ranks.get_group())
    )


class _AttentionOverRanks:
    """`attention.attend` for queries, keys and values of this rank's tokens [rows, heads, length / ranks, size]."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = group.size()

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """The mask is that of whole rows. Returns [rows, length / ranks, heads, size], and no weights."""
        # ranks without their own key/value head share one; the gradient of a copy is added to the original's
        copies = copies_over_context(key.shape[1], self._ranks)
        if copies > 1:
            key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
        query, key, value = self._gather_tokens([query, key, value])
        attended, _ = attention.attend(module, query, key, value, attention_mask, **options)
        return self._gather_heads(attended), None

    def _gather_tokens(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Each [rows, heads, length / ranks, size] to [rows, heads / ranks, length, size], in one all-to-all."""
        parts = [tensor.transpose(1, 2).unflatten(2, (self._ranks, -1)) for tensor in tensors]
        heads = [part.shape[3:] for part in parts]
        # [ranks, rows, length / ranks, width]: the heads of each rank, side by side
        joined = torch.cat([part.flatten(3) for part in parts], dim=3).permute(2, 0, 1, 3)
        tokens = self._exchange(joined).permute(1, 0, 2, 3).flatten(1, 2)
        found = tokens.split([math.prod(shape) for shape in heads], dim=2)
        return [tensor.unflatten(2, shape).transpose(1, 2) for tensor, shape in zip(found, heads, strict=True)]

    def _gather_heads(self, attended: torch.Tensor) -> torch.Tensor:
        """[rows, length, heads / ranks, size] to [rows, length / ranks, heads, size]."""
        tokens = attended.unflatten(1, (self._ranks, -1)).transpose(0, 1)
        return self._exchange(tokens).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _exchange(self, parts: torch.Tensor) -> torch.Tensor:
        """[ranks, ...]: part i goes to rank i, whose part for this rank takes its place."""
        exchanged: torch.Tensor = wait_tensor(all_to_all_single(parts.contiguous(), None, None, self._group))
        return exchanged
