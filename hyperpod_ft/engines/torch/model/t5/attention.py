"""T5's attention within packed pairs: each source and each target sees itself, and a target also its own source.

It replaces the forward pass of transformers' modules, which make a bias of [heads, length, length] for the whole row
in all three kinds of attention. T5's bias depends on the distance of two tokens alone (Raffel et al.,
arXiv:1910.10683, section 2.1), so that packing does not change it. The first layer of a stack has its weights; the
bias that it makes is handed to the other layers.

What is in place of the attention mask, which transformers hands to every layer as it is because it has four
dimensions, has one of two forms:

- bounds, int64 [1, 1, 2, K]: where each document's queries (0) and keys (1) begin, rows laid end to end, and where the
  last ones end. Each document is a separate call. The padding of a row is its last document, and may be empty.
- masks, bool [rows, 1, queries, keys], for devices that need the same shapes in every step, and accelerators, where a
  call for each document would take longer.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


class Masks(NamedTuple):
    """Masks for the three kinds of attention, in one of the two forms."""

    encoder: torch.Tensor
    decoder: torch.Tensor
    cross: torch.Tensor


def document_bounds(documents: torch.Tensor, decoder_documents: torch.Tensor) -> torch.Tensor:
    """Where each document begins in the encoder's (0) and the decoder's (1) rows, int64 [2, K].

    From document numbers [rows, length]: 1 and more, the same in both, and 0 for padding.
    """
    lengths = []
    for row in zip(documents, decoder_documents, strict=True):
        count = int(max(numbers.max() for numbers in row)) + 1
        # padding is the last document
        lengths.append(torch.stack([torch.bincount(numbers, minlength=count).roll(-1) for numbers in row]))
    return nn.functional.pad(torch.cat(lengths, 1).cumsum(1), (1, 0))


def by_bounds(bounds: torch.Tensor) -> Masks:
    """Masks from bounds [2, K]: queries and keys for each kind."""
    return Masks(*(bounds[rows][None, None] for rows in ([0, 0], [1, 1], [1, 0])))


def masks(documents: torch.Tensor, decoder_documents: torch.Tensor) -> Masks:
    """Masks [rows, 1, queries, keys] from document numbers [rows, length]."""
    positions = torch.arange(decoder_documents.shape[1], device=decoder_documents.device)
    queries = decoder_documents[:, None, :, None]
    return Masks(
        encoder=documents[:, None, :, None] == documents[:, None, None],
        decoder=(queries == decoder_documents[:, None, None]) & (positions[:, None] >= positions),
        # padding sees everything: there may be none in the other part, and a softmax over nothing is not a number
        cross=(queries == documents[:, None, None]) | (queries == 0),
    )


def replace(model: nn.Module) -> None:
    """Replace the forward pass of a T5 model's attention modules, in place; the names of its parameters stay."""
    for module in model.modules():
        if type(module).__name__ == "T5Attention":
            module.forward = _Attention(module)


class _Attention:
    """The forward pass of a T5Attention: hidden states [rows, length, width], and for cross-attention the encoder's."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        module = self._module
        source = hidden_states if key_value_states is None else key_value_states
        # as many heads as this rank has
        query, key, value = (
            project(states).unflatten(-1, (-1, module.key_value_proj_dim))
            for project, states in ((module.q, hidden_states), (module.k, source), (module.v, source))
        )
        if position_bias is None and module.has_relative_attention_bias:
            make = _bias_under_mask if mask.dtype == torch.bool else _bias_of_documents
            position_bias = make(module, mask).to(query.dtype)
        dropout = module.dropout if module.training else 0.0
        if mask.dtype == torch.bool:
            allowed = mask if position_bias is None else position_bias
            query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
            attended = scaled_dot_product_attention(query, key, value, allowed, scale=1.0, dropout_p=dropout)
            attended = attended.transpose(1, 2)
        else:
            attended = _each_document(query, key, value, mask[0, 0], position_bias, dropout)
        return module.o(attended.flatten(-2)), position_bias, None


def _bias_under_mask(module: Any, mask: torch.Tensor) -> torch.Tensor:
    """The bias [rows, heads, length, length], and -inf where a token sees none."""
    length = mask.shape[-1]
    bias = _bias(module, _buckets(module, length, mask.device)).unflatten(1, (length, length))
    return torch.where(mask, bias, -torch.inf)


def _bias_of_documents(module: Any, bounds: torch.Tensor) -> torch.Tensor:
    """The bias of all documents, [heads, sum of squared lengths], -inf where a decoder's token sees none."""
    device = module.relative_attention_bias.weight.device
    lengths = _lengths(bounds[0, 0, 0])
    of_length = {length: _buckets(module, length, device) for length in set(lengths)}
    bias = _bias(module, torch.cat([of_length[length] for length in lengths]))
    if not module.is_decoder:
        return bias
    later = [torch.ones(length, length, dtype=torch.bool, device=device).triu(1).flatten() for length in lengths]
    return bias.masked_fill(torch.cat(later), -torch.inf)


def _buckets(module: Any, length: int, device: torch.device) -> torch.Tensor:
    """The bucket of the distance of each pair of tokens of a document, int64 [length * length]."""
    positions = torch.arange(length, device=device)
    buckets: torch.Tensor = module._relative_position_bucket(
        positions[None] - positions[:, None],
        bidirectional=not module.is_decoder,
        num_buckets=module.relative_attention_num_buckets,
        max_distance=module.relative_attention_max_distance,
    )
    return buckets.flatten()


def _bias(module: Any, buckets: torch.Tensor) -> torch.Tensor:
    """[heads, buckets]"""
    weight: torch.Tensor = module.relative_attention_bias.weight
    return weight.t().index_select(1, buckets)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _each_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    bias: torch.Tensor | None,
    dropout: float,
) -> torch.Tensor:
    """Attention [rows, length, heads, size], one document after the other."""
    shape = query.shape
    lengths, key_lengths = (_lengths(row) for row in bounds)
    # split, not sliced: the gradients of slices would each be as long as the batch
    documents = [
        tensor.flatten(0, 1).split(sizes)
        for tensor, sizes in ((query, lengths), (key, key_lengths), (value, key_lengths))
    ]
    biases = bias.split([length**2 for length in lengths], 1) if bias is not None else [None] * len(lengths)
    attended = []
    for own_query, own_key, own_value, own_bias in zip(*documents, biases, strict=True):
        if not len(own_key):  # padding of a target without any of its source
            attended.append(torch.zeros_like(own_query))
            continue
        own_mask = None if own_bias is None else own_bias.view(1, -1, len(own_query), len(own_query))
        q, k, v = (part.transpose(0, 1)[None] for part in (own_query, own_key, own_value))
        found = scaled_dot_product_attention(q, k, v, own_mask, scale=1.0, dropout_p=dropout)
        attended.append(found[0].transpose(0, 1))
    return torch.cat(attended).view(shape)


def _lengths(bounds: torch.Tensor) -> list[int]:
    lengths: list[int] = bounds.diff().tolist()
    return lengths
