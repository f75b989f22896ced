"""The reader: any range of tensors in any pieces, of any number of files."""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from hyperpod_ft.checkpoint.formats.safetensors_file import read_model
from hyperpod_ft.checkpoint.tensors import reading
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor, Piece
from hyperpod_ft.errors import UserError
from tests.unit.checkpoint.tensors_to_write import write


def test_any_range_of_any_division(tmp_path: Path) -> None:
    """Pieces are boxes with any strides: rows, columns, permuted heads, transposed, cut in both directions."""
    random = np.random.default_rng(0)
    for trial in range(60):
        shape = tuple(random.integers(1, 40, random.integers(1, 4)).tolist())
        whole = random.integers(0, 1 << 16, shape).astype("<u2")
        file = tmp_path / f"{trial}.bin"
        pieces, stored = [], random.bytes(int(random.integers(0, 9)))
        for box in boxes(shape, random):
            part = whole[tuple(slice(low, high) for low, high in box)]
            order = random.permutation(len(shape))
            laid = np.ascontiguousarray(part.transpose(order))
            strides = np.empty(len(shape), int)
            strides[order] = np.array(laid.strides) // 2
            start, size = tuple(low for low, _ in box), tuple(high - low for low, high in box)
            pieces.append(Piece(file, len(stored), start, size, tuple(strides.tolist())))
            stored += laid.tobytes() + random.bytes(int(random.integers(0, 9)))
        file.write_bytes(stored)
        tensor = LogicalTensor("t", "BF16", shape, tuple(pieces))
        assert (reading.read(tensor) == whole).all()
        low, high = sorted(random.integers(0, whole.size + 1, 2).tolist())
        out = np.empty(high - low, "<u2")
        reading.fill(tensor, low, high, out)
        assert (out == whole.reshape(-1)[low:high]).all()
        assert (np.concatenate([block.copy() for block in reading.blocks(tensor, 64)]) == whole.reshape(-1)).all()


def boxes(shape: tuple[int, ...], random: np.random.Generator) -> list[list[tuple[int, int]]]:
    """Boxes that together cover a shape exactly once."""
    found: list[list[tuple[int, int]]] = [[]]
    for size in shape:
        cuts = sorted({0, size, *random.integers(0, size + 1, 2).tolist()})
        found = [[*box, edge] for box in found for edge in pairwise(cuts)]
    return found


def test_more_files_than_may_be_open(tmp_path: Path) -> None:
    rows = np.arange(3000, dtype="<u2").reshape(3000, 1)
    pieces = []
    for number, row in enumerate(rows):
        (tmp_path / f"{number}").write_bytes(row.tobytes())
        pieces.append(Piece(tmp_path / f"{number}", 0, (number, 0), (1, 1), (1, 1)))
    tensor = LogicalTensor("t", "BF16", rows.shape, tuple(pieces))
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert (reading.read(tensor) == rows).all()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 130
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_file_that_ends_early_or_is_gone(tmp_path: Path) -> None:
    write(tmp_path / "model", {"large": ("U8", np.zeros(20_000_000, np.uint8))})
    (tensor,) = read_model(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    os.truncate(file, 10_000_000)
    with pytest.raises(UserError, match="is truncated: it ends at byte"):
        reading.read(tensor)
    file.unlink()
    with pytest.raises(UserError, match="cannot be read: No such file"):
        reading.read(tensor)
