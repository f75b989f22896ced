"""Reads and compares any range of a logical tensor's elements: no whole tensor must fit in memory. Thread-safe."""

from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path

import numpy as np

from hyperpod_ft.checkpoint.tensors import direct
from hyperpod_ft.checkpoint.tensors.elements import ARITHMETIC, STORED, Stored, convert, nonfinite, widen
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor, Piece, contiguous_strides
from hyperpod_ft.errors import UserError


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


# Elements compared at a time: few, since a difference is usually near the start.
_BLOCK_ELEMENTS = 1 << 19


def same_values(tensor: LogicalTensor, other: LogicalTensor) -> bool:
    """Whether a tensor, rounded to the other's dtype, equals the other bit for bit. Stops at the first difference."""
    if tensor.shape != other.shape:
        return False
    rounded, found = (np.empty(min(_BLOCK_ELEMENTS, tensor.elements), STORED[other.dtype]) for _ in range(2))
    for begin in range(0, tensor.elements, _BLOCK_ELEMENTS):
        end = min(begin + _BLOCK_ELEMENTS, tensor.elements)
        fill_as(tensor, other.dtype, begin, end, rounded[: end - begin])
        fill(other, begin, end, found[: end - begin])
        if rounded[: end - begin].tobytes() != found[: end - begin].tobytes():
            return False
    return True


def refuse_divergence(tensors: Iterable[LogicalTensor], where: Path) -> None:
    """Raise UserError when a tensor differs from its replicas on other ranks.

    Ranks with different values train different models, and it is unknown which copy is right.
    """
    differing = [(name, by) for name, by in ((tensor.name, _divergence(tensor)) for tensor in tensors) if by]
    if differing:
        name, largest = max(differing, key=lambda pair: pair[1])
        raise UserError(
            f"{where}: {len(differing)} tensors should be equal on every rank but differ; the largest difference is"
            f" {largest:.6g}, in {name}",
            "train again: the ranks trained different models, as sequence parallelism without summed gradients does",
        )


def _divergence(tensor: LogicalTensor) -> float:
    """The largest absolute difference of any replica; infinite if NaNs or values without arithmetic differ."""
    return max((_difference(tensor, replica) for replica in tensor.replicas), default=0.0)


def _difference(tensor: LogicalTensor, replica: Piece) -> float:
    counterpart = tensor.part(replica.start, replica.shape)
    copy = LogicalTensor(tensor.name, tensor.dtype, replica.shape, (replica.alone,))
    largest = 0.0
    for ours, theirs in zip(blocks(counterpart), blocks(copy), strict=True):
        if ours.tobytes() == theirs.tobytes():
            continue
        if tensor.dtype not in ARITHMETIC or nonfinite(ours, tensor.dtype) or nonfinite(theirs, tensor.dtype):
            return float("inf")
        largest = max(largest, float(np.abs(widen(ours, tensor.dtype) - widen(theirs, tensor.dtype)).max()))
        # 0 and -0 are equal numbers with different bits: not a divergence
    return largest
