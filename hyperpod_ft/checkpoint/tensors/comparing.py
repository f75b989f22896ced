"""Compares two tensors, and the copies of a tensor on different ranks."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from hyperpod_ft.checkpoint.tensors import reading
from hyperpod_ft.checkpoint.tensors.elements import ARITHMETIC, STORED, nonfinite, widen
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor, Piece
from hyperpod_ft.errors import UserError

# Elements compared at a time: few, since a difference is usually near the start.
_BLOCK_ELEMENTS = 1 << 19


def same_values(tensor: LogicalTensor, other: LogicalTensor) -> bool:
    """Whether a tensor, rounded to the other's dtype, equals the other bit for bit. Stops at the first difference."""
    if tensor.shape != other.shape:
        return False
    rounded, found = (np.empty(min(_BLOCK_ELEMENTS, tensor.elements), STORED[other.dtype]) for _ in range(2))
    for begin in range(0, tensor.elements, _BLOCK_ELEMENTS):
        end = min(begin + _BLOCK_ELEMENTS, tensor.elements)
        reading.fill_as(tensor, other.dtype, begin, end, rounded[: end - begin])
        reading.fill(other, begin, end, found[: end - begin])
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
    for ours, theirs in zip(reading.blocks(counterpart), reading.blocks(copy), strict=True):
        if ours.tobytes() == theirs.tobytes():
            continue
        if tensor.dtype not in ARITHMETIC or nonfinite(ours, tensor.dtype) or nonfinite(theirs, tensor.dtype):
            return float("inf")
        largest = max(largest, float(np.abs(widen(ours, tensor.dtype) - widen(theirs, tensor.dtype)).max()))
        # 0 and -0 are equal numbers with different bits: not a divergence
    return largest
