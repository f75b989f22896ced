"""Reads any range of a logical tensor's elements, so that no whole tensor must fit in memory. Thread-safe."""

from collections.abc import Iterator
from math import prod

import numpy as np

from hyperpod_ft.checkpoint.tensors import direct
from hyperpod_ft.checkpoint.tensors.elements import STORED, Stored, convert
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor, Piece, contiguous_strides


def fill(tensor: LogicalTensor, begin: int, end: int, out: Stored) -> None:
    """Read elements [begin, end) in row-major order into `out`, 1-D, of the stored dtype (`elements.STORED`).

    Raises UserError when a file ends early or cannot be read.
    """
    row = prod(tensor.shape[1:])
    if all(_holds_whole_rows(piece, tensor) for piece in tensor.pieces):
        for piece in tensor.pieces:
            first = piece.start[0] * row if tensor.shape else 0
            low, high = max(begin, first), min(end, first + prod(piece.shape))
            if low < high:
                direct.read(piece.file, piece.offset + (low - first) * out.itemsize, out[low - begin : high - begin])
        return
    first_row, last_row = begin // row, -(-end // row)
    rows = np.empty((last_row - first_row, *tensor.shape[1:]), out.dtype)
    for piece in tensor.pieces:
        _copy_rows(piece, first_row, last_row, rows)
    out[:] = rows.reshape(-1)[begin - first_row * row : end - first_row * row]


def fill_as(tensor: LogicalTensor, dtype: str, begin: int, end: int, out: Stored) -> None:
    """Read elements [begin, end) into `out`, 1-D of the stored form of `dtype`, each rounded once."""
    if tensor.dtype == dtype:
        fill(tensor, begin, end, out)
    else:
        stored = np.empty(end - begin, STORED[tensor.dtype])
        fill(tensor, begin, end, stored)
        convert(stored, tensor.dtype, dtype, out)


def read(tensor: LogicalTensor) -> Stored:
    """The whole tensor in its stored form, in its shape."""
    whole = np.empty(tensor.elements, STORED[tensor.dtype])
    fill(tensor, 0, tensor.elements, whole)
    return whole.reshape(tensor.shape)


def blocks(tensor: LogicalTensor, block_bytes: int = direct.BLOCK_BYTES) -> Iterator[Stored]:
    """All elements in order, 1-D, `block_bytes` at a time; each block is overwritten by the next."""
    dtype = STORED[tensor.dtype]
    step = max(1, block_bytes // dtype.itemsize)
    buffer = np.empty(min(tensor.elements, step), dtype)
    for begin in range(0, tensor.elements, step):
        end = min(begin + step, tensor.elements)
        fill(tensor, begin, end, buffer[: end - begin])
        yield buffer[: end - begin]


def _holds_whole_rows(piece: Piece, tensor: LogicalTensor) -> bool:
    return piece.shape[1:] == tensor.shape[1:] and piece.strides == contiguous_strides(piece.shape)


def _copy_rows(piece: Piece, first: int, last: int, rows: Stored) -> None:
    """Copy the piece's part of rows [first, last) of its tensor into `rows`, which holds just these."""
    low, high = max(first, piece.start[0]), min(last, piece.start[0] + piece.shape[0])
    if low >= high or 0 in piece.shape:
        return
    shape = (high - low, *piece.shape[1:])
    part = Piece(piece.file, 0, piece.start, shape, piece.strides)
    content = np.empty(part.extent, rows.dtype)
    direct.read(piece.file, piece.offset + (low - piece.start[0]) * piece.strides[0] * rows.itemsize, content)
    box: Stored = np.ndarray(shape, rows.dtype, content.data, 0, tuple(n * rows.itemsize for n in piece.strides))
    begins = (low - first, *piece.start[1:])
    rows[tuple(slice(begin, begin + size) for begin, size in zip(begins, shape, strict=True))] = box
