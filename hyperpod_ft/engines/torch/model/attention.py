"""Attention within documents: the tokens of a packed row see the earlier tokens of their own document, nothing else.

One function, registered with transformers as the implementation `documents`, serves every family whose attention goes
through transformers' AttentionInterface. An int32 tensor in place of the attention mask says where documents begin:
transformers hands a mask of four dimensions to every layer as it is (masking_utils.py,
_preprocess_mask_arguments), through recomputation, sharding and compilation. It has one of two forms:

- bounds [1, 1, 1, K]: where each document of the batch begins, its rows laid end to end, then where the last one ends.
  The last entry is repeated up to K, a power of two, so that a compiler sees few shapes. On CUDA in 16 bits this is
  what flash attention takes; elsewhere each document is a separate call. Neither makes a tensor of [length, length].
- numbers [rows, 1, length, 1]: each token's document, for devices that need the same shapes in every step. They build
  a dense mask.
"""

import inspect
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gptj import modeling_gptj

from hyperpod_ft.engines.torch import devices
from hyperpod_ft.errors import UserError

NAME = "documents"
# Queries that share a mask where one is needed: of [_BLOCK, window + _BLOCK] for a sliding window.
_BLOCK = 256
# Torch 2.11 has no such argument; its kernel takes fewer heads of keys and values all the same.
_FEWER_HEADS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_FLASH_HEAD_SIZE = 256  # the largest
_FLASH_HEAD_STEP = 8  # sizes are multiples of this; flash attention itself pads nothing
# The lengths of a batch's documents, by the memory of its bounds: read in every layer, a GPU would wait each time.
_LENGTHS: WeakKeyDictionary[torch.UntypedStorage, list[int]] = WeakKeyDictionary()


class _Weighting(NamedTuple):
    """How the products of queries and keys become the weights of values."""

    scaling: float | None  # of products; None: 1 / sqrt(size)
    softcap: float | None  # c makes of a score s c tanh(s / c)
    dropout: float  # of weights


def document_bounds(position_ids: torch.Tensor) -> torch.Tensor:
    """The documents of a batch as bounds, from positions [rows, length] that are 0 where one begins."""
    starts = _starts(position_ids).flatten().nonzero().flatten()
    padded = starts.new_full((1 << len(starts).bit_length(),), position_ids.numel())
    padded[: len(starts)] = starts
    return padded.int()[None, None, None]


def keep_lengths(bounds: torch.Tensor, on_host: torch.Tensor) -> None:
    """Note the lengths of documents, so that no layer reads them from the device. `on_host`: equal bounds."""
    _LENGTHS[bounds.untyped_storage()] = _lengths(on_host)


def document_numbers(position_ids: torch.Tensor) -> torch.Tensor:
    """The documents of a batch as numbers, from positions [rows, length] that are 0 where one begins."""
    return _starts(position_ids).cumsum(1).int()[:, None, :, None]


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention call: query [rows, heads, length, size], keys and values with as many heads or fewer.

    Returns [rows, length, heads, size], and no weights. A window of n lets a token see itself and n - 1 before it.
    Raises UserError for what would change the attention in a way that is not computed here.
    """
    _refuse(module, attention_mask, others)
    assert attention_mask is not None
    weighting = _Weighting(scaling, softcap, dropout)
    if attention_mask.shape[-1] == 1:
        mask = _dense_mask(attention_mask, sliding_window)
        return _product(query, key, value, mask, weighting).transpose(1, 2).contiguous(), None
    bounds = attention_mask.flatten()
    # the memory of a projection's output: nothing is copied
    tokens = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    if query.is_cuda and not softcap and not dropout and _flash(tokens):
        length = query.shape[2]
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        attended = varlen_attn(
            *(tokens[0], tokens[1], tokens[2], bounds, bounds, length, length),
            scale=scaling,
            window_size=window,
            **_FEWER_HEADS,
        )
        assert isinstance(attended, torch.Tensor)
    else:
        attended = _each_document(tokens, bounds, sliding_window, weighting)
    return attended.unflatten(0, (len(query), -1)), None


AttentionInterface.register(NAME, attend)


def _lengths(bounds: torch.Tensor) -> list[int]:
    return [length for length in bounds.flatten().diff().tolist() if length]


def _starts(position_ids: torch.Tensor) -> torch.Tensor:
    starts = position_ids == 0
    starts[:, 0] = True
    return starts


def _refuse(module: torch.nn.Module, attention_mask: torch.Tensor | None, others: dict[str, Any]) -> None:
    is_causal = others.get("is_causal")
    found = {
        "attention sinks": others.get("s_aux") is not None,
        "a position bias": others.get("position_bias") is not None,
        "attention to later tokens": not (getattr(module, "is_causal", True) if is_causal is None else is_causal),
        "attention without the bounds of documents": attention_mask is None,
    }
    if unknown := [name for name, present in found.items() if present]:
        raise UserError(
            f"model.source: {type(module).__name__} has {unknown[0]}, which engine torch does not compute",
            "choose a model without it",
        )


def _flash(tokens: list[torch.Tensor]) -> bool:
    sizes = {tensor.shape[-1] for tensor in tokens}
    return (
        {tensor.dtype for tensor in tokens} <= {*_FLASH_DTYPES}
        and len(sizes) == 1
        and max(sizes) <= _FLASH_HEAD_SIZE
        and max(sizes) % _FLASH_HEAD_STEP == 0
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _each_document(
    tokens: list[torch.Tensor], bounds: torch.Tensor, window: int | None, weighting: _Weighting
) -> torch.Tensor:
    """Query, key, value [tokens, heads, size] to [tokens, heads, size], one document after the other.

    It is never compiled: that would be done again for each length of a document.
    """
    scaling, softcap, dropout = weighting
    lengths = _LENGTHS.get(bounds.untyped_storage()) or _lengths(bounds)
    # split, not sliced: the gradients of slices would each be as long as the batch
    documents = zip(*(tensor.split(lengths) for tensor in tokens), strict=True)
    attended = []
    for document in documents:
        query, key, value = (part.transpose(0, 1)[None] for part in document)
        length = query.shape[2]
        if softcap is None and (window is None or length <= window):
            found = scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=True
            )
        else:
            found = _blocks(query, key, value, window or length, weighting)
        attended.append(found[0].transpose(0, 1))
    return torch.cat(attended)


def _blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, weighting: _Weighting
) -> torch.Tensor:
    """Attention [1, heads, length, size] of one document where each block of queries needs its own mask."""
    length = query.shape[2]
    positions = torch.arange(length, device=query.device)
    attended = []
    for begin in range(0, length, _BLOCK):
        end = min(begin + _BLOCK, length)
        first = max(0, begin - window + 1)
        distance = positions[begin:end, None] - positions[None, first:end]
        mask = (distance >= 0) & (distance < window)
        parts = query[:, :, begin:end], key[:, :, first:end], value[:, :, first:end]
        attended.append(_product(*parts, mask, weighting))
    return torch.cat(attended, dim=2)


def _dense_mask(numbers: torch.Tensor, window: int | None) -> torch.Tensor:
    """Bool [rows, 1, length, length] from document numbers [rows, 1, length, 1]."""
    positions = torch.arange(numbers.shape[2], device=numbers.device)
    distance = positions[:, None] - positions
    mask = (numbers == numbers.transpose(2, 3)) & (distance >= 0)
    return mask if window is None else mask & (distance < window)


def _product(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, weighting: _Weighting
) -> torch.Tensor:
    """Attention [rows, heads, queries, size] under a bool mask.

    Where shapes are fixed, in operations that every compiler knows: torch's attention counts as random, even without
    dropout, so that a graph that computes it again for the backward pass would keep a generator's state.
    """
    scaling, softcap, dropout = weighting
    if softcap is None and not devices.fixed_shapes(query.device):
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, dropout_p=dropout, enable_gqa=True
        )
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    # each token sees itself, so that what is finite but far below has weight 0
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    exact = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=exact).to(query.dtype)
    return torch.nn.functional.dropout(weights, dropout) @ value


class _GptJAttention(modeling_gptj.GPTJAttention):
    """Transformers' class, which does not call AttentionInterface, whose tensors are [rows, heads, length, size]."""

    def _attn(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        dropout = self.attn_dropout.p if self.training else 0.0
        attention = ALL_ATTENTION_FUNCTIONS[NAME]  # ranks that share rows register their own
        attended, _ = attention(self, query, key, value, attention_mask, dropout=dropout)
        return attended.transpose(1, 2), None


modeling_gptj.GPTJ_ATTENTION_CLASSES[NAME] = _GptJAttention
