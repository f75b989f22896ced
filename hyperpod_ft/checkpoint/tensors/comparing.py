"""Compares two tensors, and the copies of a tensor on different ranks."""

from collections.abc import Iterable
from math import prod
from pathlib import Path

import numpy as np

from hyperpod_ft.checkpoint.tensors.direct import BLOCK_BYTES
from hyperpod_ft.checkpoint.tensors.elements import ARITHMETIC, STORED, convert, nonfinite, widen
from hyperpod_ft.checkpoint.tensors.layout import LogicalTensor, Piece
from hyperpod_ft.checkpoint.tensors.reading import Reader
from hyperpod_ft.errors import UserError

# Elements in the first block.
_FIRST_LOOK = 1 << 17


def same_values(reader: Reader, tensor: LogicalTensor, other: LogicalTensor) -> bool:
    """Whether a tensor, rounded to the other's dtype, equals the other bit for bit.

    Stops at the first difference, which is usually near the start: the first block is small, and each next one is twice
    as large.
    """
    if tensor.shape != other.shape:
        return False
    ours, theirs = STORED[tensor.dtype], STORED[other.dtype]
    most = BLOCK_BYTES // max(ours.itemsize, theirs.itemsize)
    begin, step = 0, _FIRST_LOOK
    while begin < tensor.elements:
        end = min(begin + step, tensor.elements)
        stored, rounded, found = (
            np.empty(end - begin, ours),
            np.empty(end - begin, theirs),
            np.empty(end - begin, theirs),
        )
        reader.fill(tensor, begin, end, stored)
        reader.fill(other, begin, end, found)
        convert(stored, tensor.dtype, other.dtype, rounded)
        if rounded.tobytes() != found.tobytes():
            return False
        begin, step = end, min(2 * step, most)
    return True


def refuse_divergence(reader: Reader, tensors: Iterable[LogicalTensor], where: Path) -> None:
    """Raise UserError when a tensor differs from its replicas on other ranks.

    Ranks with different values train different models, and it is unknown which copy is right.
    """
    differing = [(name, by) for name, by in ((tensor.name, _divergence(reader, tensor)) for tensor in tensors) if by]
    if differing:
        name, largest = max(differing, key=lambda pair: pair[1])
        raise UserError(
            f"{where}: {len(differing)} tensors that should be equal on every rank differ, {name} most:"
            f" largest difference {largest:.6g}",
            "train again: the ranks trained different models, as sequence parallelism without summed gradients does",
        )


def _divergence(reader: Reader, tensor: LogicalTensor) -> float:
    """The largest absolute difference of any replica; infinite if NaNs or values without arithmetic differ."""
    return max((_difference(reader, tensor, replica) for replica in tensor.replicas), default=0.0)


def _difference(reader: Reader, tensor: LogicalTensor, replica: Piece) -> float:
    counterpart = _box(tensor, replica)
    copy = LogicalTensor(tensor.name, tensor.dtype, replica.shape, (replica.alone,))
    largest = 0.0
    for ours, theirs in zip(reader.blocks(counterpart), reader.blocks(copy), strict=True):
        if ours.tobytes() == theirs.tobytes():
            continue
        if tensor.dtype not in ARITHMETIC or nonfinite(ours, tensor.dtype) or nonfinite(theirs, tensor.dtype):
            return float("inf")
        largest = max(largest, float(np.abs(widen(ours, tensor.dtype) - widen(theirs, tensor.dtype)).max()))
        # 0 and -0 are equal numbers with different bits: not a divergence
    return largest


def _box(tensor: LogicalTensor, box: Piece) -> LogicalTensor:
    """The part of a tensor that `box` covers, as a separate tensor."""
    width = STORED[tensor.dtype].itemsize
    pieces = []
    for piece in tensor.pieces:
        axes = list(zip(piece.start, piece.shape, box.start, box.shape, strict=True))
        low = [max(ours, theirs) for ours, _, theirs, _ in axes]
        high = [min(ours + held, theirs + wanted) for ours, held, theirs, wanted in axes]
        shape = tuple(end - begin for begin, end in zip(low, high, strict=True))
        if shape and min(shape) <= 0:
            continue
        inside = [begin - start for begin, start in zip(low, piece.start, strict=True)]
        offset = piece.offset + sum(n * stride for n, stride in zip(inside, piece.strides, strict=True)) * width
        start = tuple(begin - start for begin, start in zip(low, box.start, strict=True))
        pieces.append(Piece(piece.file, offset, start, shape, piece.strides))
    assert sum(prod(piece.shape) for piece in pieces) == prod(box.shape), tensor.name
    return LogicalTensor(tensor.name, tensor.dtype, box.shape, tuple(pieces))
