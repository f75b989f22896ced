"""Slices of stored tensors: any box, any block size, any destination."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor, Piece, contiguous_strides
from hyperpod_ft.engines.torch.loading.slices import SliceReader
from hyperpod_ft.errors import UserError

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, str, list[tuple[int, int]], int, torch.dtype, int]:
    """Values, their stored dtype, a box of them, a block size in bytes, the dtype wanted, and pieces of dimension 0."""
    shape = draw(st.lists(st.integers(1, 9), min_size=0, max_size=4))
    stored, wanted = draw(st.sampled_from(sorted(DTYPES))), draw(st.sampled_from(list(DTYPES.values())))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    box = []
    for size in shape:
        low = draw(st.integers(0, size))
        box.append((low, draw(st.integers(low, size))))
    return values.to(DTYPES[stored]), stored, box, draw(st.integers(1, 64)) * 4, wanted, draw(st.integers(1, 3))


@given(cases())
@settings(max_examples=300, deadline=None)
def test_a_box_is_what_indexing_gives(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[torch.Tensor, str, list[tuple[int, int]], int, torch.dtype, int],
) -> None:
    values, dtype, box, block_bytes, wanted, count = case
    file = tmp_path_factory.mktemp("slices") / "data"
    file.write_bytes(b"header!" + values.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    shape = tuple(values.shape)
    # several pieces, as experts are; where there is no dimension to cut, one
    cuts = [round(index * shape[0] / count) for index in range(count + 1)] if shape else [0, 1]
    strides = contiguous_strides(shape)
    pieces = tuple(
        Piece(
            file,
            7 + low * (strides[0] if shape else 0) * values.itemsize,
            (low, *(0 for _ in shape[1:])) if shape else (),
            (high - low, *shape[1:]) if shape else (),
            strides,
        )
        for low, high in pairwise(cuts)
    )
    expected = values[tuple(slice(*bounds) for bounds in box)].to(wanted)
    # every second element of a larger tensor: the destination need not be contiguous
    out = torch.full((*expected.shape, 2), 7.0, dtype=wanted)
    with SliceReader(block_bytes) as reader:
        reader.copy(LogicalTensor("w", dtype, shape, pieces), [low for low, _ in box], out[..., 0])
    assert torch.equal(out[..., 0], expected)
    assert bool((out[..., 1] == 7).all())


def stored(file: Path, values: np.ndarray) -> LogicalTensor:
    file.write_bytes(values.astype("<f4").tobytes())
    piece = Piece(file, 0, (0,) * values.ndim, values.shape, contiguous_strides(values.shape))
    return LogicalTensor("w", "F32", values.shape, (piece,))


def test_a_file_that_ends_early_or_is_gone_is_one_line(tmp_path: Path) -> None:
    tensor = stored(tmp_path / "data", np.ones((4, 4)))
    (tmp_path / "data").write_bytes(b"short")
    with SliceReader() as reader, pytest.raises(UserError, match="data: ended early, at byte 5"):
        reader.copy(tensor, (0, 0), torch.empty(4, 4))
    (tmp_path / "data").unlink()
    with SliceReader() as reader, pytest.raises(UserError, match="data: cannot be read: No such file"):
        reader.copy(tensor, (0, 0), torch.empty(4, 4))


def test_a_replica_must_hold_the_same_values(tmp_path: Path) -> None:
    values = np.arange(12).reshape(4, 3)
    tensor, copy = stored(tmp_path / "one", values), stored(tmp_path / "two", values)
    both = LogicalTensor("w", "F32", tensor.shape, tensor.pieces, copy.pieces)
    out = torch.empty(2, 3, dtype=torch.bfloat16)
    with SliceReader(block_bytes=8) as reader:
        reader.copy(both, (2, 0), out)
        assert out.tolist() == values[2:].tolist()
        stored(tmp_path / "two", values + (values == 11))
        with pytest.raises(UserError, match=r"two: tensor w is stored twice, with different values.*tie_word"):
            reader.copy(both, (2, 0), out)
