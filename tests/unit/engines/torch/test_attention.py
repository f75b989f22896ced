"""Attention within documents against the textbook's, by each strategy."""

import inspect
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hyperpod_ft.engines.torch.model import attention
from hyperpod_ft.errors import UserError

HEADS, GROUPS, SIZE = 4, 2, 8
LENGTHS = ((9, 300, 1, 10), (320,))  # of the documents in each row
SETTINGS: list[dict[str, Any]] = [
    {},
    {"scaling": 0.3},
    {"sliding_window": 5},
    {"sliding_window": 280},
    {"softcap": 1.5},
    {"softcap": 1.5, "sliding_window": 7, "scaling": 0.5},
]
MODULE = torch.nn.Module()
# torch 2.11 is not told
IS_TOLD_OF_FEWER_HEADS = "enable_gqa" in inspect.signature(attention.varlen_attn).parameters


def positions(rows: tuple[tuple[int, ...], ...] = LENGTHS) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


def projections(rows: int, length: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Query, key and value as a model has them: [rows, heads, length, size] in the memory of [rows, length, ...]."""
    random = torch.Generator().manual_seed(0)
    heads = (HEADS, HEADS // GROUPS, HEADS // GROUPS)
    made = [torch.randn(rows, length, count, SIZE, dtype=dtype, generator=random) for count in heads]
    return [tensor.transpose(1, 2).detach().requires_grad_() for tensor in made]


def textbook(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: Any) -> torch.Tensor:
    key, value = (tensor.repeat_interleave(GROUPS, 1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * settings.get("scaling", SIZE**-0.5)
    if cap := settings.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    for row, lengths in enumerate(LENGTHS):
        document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        index = torch.arange(len(document))
        distance = index[:, None] - index
        seen = (document[:, None] == document) & (distance >= 0)
        seen &= distance < settings.get("sliding_window", len(document))
        scores[row] = scores[row].masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def with_gradients(output: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    weights = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1))
    return [output, *torch.autograd.grad((output * weights).sum(), inputs)]


@pytest.mark.parametrize("documents", [attention.document_bounds, attention.document_numbers])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_output_and_gradients_are_the_textbooks(documents: Any, settings: dict[str, Any]) -> None:
    inputs = projections(*positions().shape)
    found, _ = attention.attend(MODULE, *inputs, documents(positions()), **settings)
    for one, other in zip(
        with_gradients(found, inputs), with_gradients(textbook(*inputs, **settings), inputs), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    bounds_of_keys: torch.Tensor,
    longest: int,
    longest_of_keys: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool = not IS_TOLD_OF_FEWER_HEADS,
) -> torch.Tensor:
    """What torch documents of varlen_attn: (W, 0) lets a token see W before it, and (-1, 0) all."""
    assert (
        bounds is bounds_of_keys and bounds.dtype == torch.int32 and bounds.diff().max() <= longest_of_keys == longest
    )
    assert enable_gqa and window_size[1] == 0
    window = {} if window_size[0] == -1 else {"sliding_window": window_size[0] + 1}
    heads = [tensor.unflatten(0, (len(LENGTHS), -1)).transpose(1, 2) for tensor in (query, key, value)]
    return textbook(*heads, **window, **({} if scale is None else {"scaling": scale})).flatten(0, 1)


@pytest.mark.parametrize("settings", SETTINGS[:4], ids=str)
def test_what_flash_attention_is_given(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch for CUDA, around a stand-in for the kernel."""
    monkeypatch.setattr(attention, "varlen_attn", flash)
    monkeypatch.setattr(attention, "_FLASH_DTYPES", (torch.float64,))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    inputs = projections(*positions().shape)
    found, _ = attention.attend(MODULE, *inputs, attention.document_bounds(positions()), **settings)
    torch.testing.assert_close(found, textbook(*inputs, **settings))


@pytest.mark.parametrize(("size", "serves"), [(8, True), (96, True), (256, True), (60, False), (264, False)])
def test_head_sizes_of_flash_attention(size: int, serves: bool) -> None:
    tokens = [torch.empty(1, 1, size, dtype=torch.bfloat16)] * 3
    assert attention._flash(tokens) == serves


def test_bounds_and_numbers() -> None:
    # the second row begins within a document that the first row cut
    ids = torch.tensor([[0, 1, 0, 0], [2, 3, 4, 0]])
    assert attention.document_bounds(ids).tolist() == [[[[0, 2, 3, 4, 7, 8, 8, 8]]]]
    assert attention.document_numbers(ids)[:, 0, :, 0].tolist() == [[1, 1, 2, 3], [1, 1, 1, 2]]


@pytest.mark.parametrize("documents", range(1, 9))
def test_bounds_end_with_the_last_token(documents: int) -> None:
    bounds = attention.document_bounds(torch.arange(2).repeat(documents)[None]).flatten()
    assert bounds.unique().tolist() == list(range(0, 2 * documents + 1, 2))
    assert len(bounds) & (len(bounds) - 1) == 0, "a power of two"


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("settings", [{}, {"sliding_window": 64}], ids=str)
def test_no_tensor_is_as_large_as_a_mask(settings: dict[str, Any]) -> None:
    length = 2048
    ids = torch.arange(length)[None]
    inputs = projections(1, length, torch.float32)
    with Largest() as largest:
        attention.attend(MODULE, *inputs, attention.document_bounds(ids), **settings)[0].sum().backward()
    assert largest.elements <= HEADS * 256 * (256 + 64) < length**2 / 8
    with Largest() as largest:  # the check can fail
        attention.attend(MODULE, *inputs, attention.document_numbers(ids), **settings)
    assert largest.elements >= length**2


def test_dropout_keeps_the_mean() -> None:
    torch.manual_seed(0)
    query, key, value = projections(*positions().shape)
    ones = torch.ones_like(value)
    for documents in (attention.document_bounds(positions()), attention.document_numbers(positions())):
        found, _ = attention.attend(MODULE, query, key, ones, documents, dropout=0.5)
        assert found.std() > 0.05 and found.mean().item() == pytest.approx(1, abs=0.02)


def test_fixed_shapes_compile_without_a_break() -> None:
    inputs, documents = projections(*positions().shape), attention.document_numbers(positions())
    compiled = torch.compile(attention.attend, fullgraph=True, backend="aot_eager", dynamic=False)
    settings = {"sliding_window": 5}
    torch.testing.assert_close(
        compiled(MODULE, *inputs, documents, **settings), attention.attend(MODULE, *inputs, documents, **settings)
    )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"s_aux": torch.ones(HEADS)}, "attention sinks"),
        ({"position_bias": torch.ones(1)}, "a position bias"),
        ({"is_causal": False}, "later tokens"),
        ({"attention_mask": None}, "bounds of documents"),
    ],
)
def test_what_is_not_computed_is_refused(settings: dict[str, Any], named: str) -> None:
    arguments = {"attention_mask": attention.document_bounds(positions())} | settings
    with pytest.raises(UserError, match=named):
        attention.attend(MODULE, *projections(*positions().shape), **arguments)
