"""Embedding and output matrix divided over tensor-parallel ranks by rows, the entries of the vocabulary.

A rank looks up the entries it has and zeros for others; the sum over the ranks is the embedding. It computes the logits
of its entries alone (loss.py). Rows are divided as evenly as whole rows allow, so any vocabulary can be divided.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyperpod_ft.engines.torch.lora import adapters
from hyperpod_ft.engines.torch.sharding.shards import TensorSplit
from hyperpod_ft.engines.torch.tensor_collectives import sum_over_ranks


@dataclass(frozen=True)
class VocabularyRows:
    """The rows of a rank, and the ranks that have the others."""

    own: range
    group: dist.ProcessGroup


def vocabulary_rows_of(head: nn.Module) -> VocabularyRows | None:
    """The rows whose logits a head computes; None for all of them."""
    return getattr(head, "vocabulary_rows", None)


def divide(
    embeddings: Sequence[nn.Module], head: Any, vocabulary: int, group: dist.ProcessGroup
) -> dict[nn.Parameter, TensorSplit]:
    """Divide embeddings, which may be one matrix, and head, in place; returns what became of their parameters.

    Factors of an embedding's adapter stay whole; those of the head's are divided as those of other linears.
    """
    dividing = _Dividing(vocabulary, group)
    for embedding in embeddings:
        dividing.rows(embedding, "weight")
        embedding.forward = _OwnRows(embedding, dividing.vocabulary_rows)
        if adapters.is_adapted(embedding):
            adapters.divide_embedding(embedding, dividing.vocabulary_rows.own, group)
    dividing.rows(head, "weight", "bias", "lora_magnitude_vector")
    head.vocabulary_rows = dividing.vocabulary_rows
    if adapters.is_adapted(head):
        dividing.splits[head.lora_A.weight] = TensorSplit(head.lora_A.weight.shape, sums=group)
        dividing.rows(head.lora_B, "weight")
    return dividing.splits


class _Dividing:
    """`splits` by parameter; a tied matrix is divided once."""

    def __init__(self, vocabulary: int, group: dist.ProcessGroup) -> None:
        self.vocabulary_rows = VocabularyRows(_even(vocabulary, group), group)
        self.splits: dict[nn.Parameter, TensorSplit] = {}
        self._own: dict[nn.Parameter, nn.Parameter] = {}  # by the whole one

    def rows(self, module: Any, *keys: str) -> None:
        for key in keys:
            whole = getattr(module, key, None)
            if whole is None:
                continue
            if whole not in self._own:
                group = self.vocabulary_rows.group
                split = TensorSplit(whole.shape, 0, (self.vocabulary_rows.own,), group.rank(), group.size())
                self._own[whole] = nn.Parameter(split.take(whole.data), requires_grad=whole.requires_grad)
                self.splits[self._own[whole]] = split
            setattr(module, key, self._own[whole])


def _even(size: int, group: dist.ProcessGroup) -> range:
    """This rank's share of `size` rows; if they do not divide evenly, the first ranks have one more."""
    each, more = divmod(size, group.size())
    begin = group.rank() * each + min(group.rank(), more)
    return range(begin, begin + each + (group.rank() < more))


class _OwnRows:
    """The forward pass of an embedding divided by rows, around its class's own: ids [...] -> [..., width]."""

    def __init__(self, embedding: Any, vocabulary_rows: VocabularyRows) -> None:
        self._forward, self._rows = embedding.forward, vocabulary_rows
        padding = embedding.padding_idx
        # its row has no gradient
        embedding.padding_idx = vocabulary_rows.own.index(padding) if padding in vocabulary_rows.own else None

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        own = self._rows.own
        is_own = (ids >= own.start) & (ids < own.stop)
        found = self._forward(torch.where(is_own, ids - own.start, 0)) * is_own[..., None]
        return sum_over_ranks(found, self._rows.group)
