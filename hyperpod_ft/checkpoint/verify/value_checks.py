"""Checks tensor elements while they are read: non-finite values, and differences from expected values."""

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hyperpod_ft.checkpoint.tensors import direct, reading
from hyperpod_ft.checkpoint.tensors.elements import ARITHMETIC, STORED, Stored, nonfinite, widen
from hyperpod_ft.checkpoint.tensors.logical_tensor import FLOATING, LogicalTensor

_CACHED_ELEMENTS = 1 << 16  # one pass and its temporaries fit in the core's own cache


@dataclass(frozen=True)
class Difference:
    """The number of elements that differ by more than the tolerance, and the largest absolute difference of all.

    `largest` is NaN if a value is NaN or unknown, such as an 8-bit float without its scale.
    """

    elements: int = 0
    largest: float = 0.0

    def __add__(self, other: "Difference") -> "Difference":
        # unlike Python's max, numpy's lets NaN through from either side
        return Difference(self.elements + other.elements, float(np.maximum(self.largest, other.largest)))


class ValueChecks:
    """Checks elements; thread-safe. `expected`: by name, tensors of the same shape to compare with.

    `tolerance` is absolute; 0 requires the same bits, or the same values if the dtypes differ.
    """

    def __init__(self, expected: Mapping[str, LogicalTensor], tolerance: float) -> None:
        self._expected = expected
        self._tolerance = tolerance
        self._changing = threading.Lock()
        self.nonfinite: dict[str, str] = {}  # `NaN` or `Inf`, by tensor
        self.differences: dict[str, Difference] = {}  # by tensor, if any bits differ

    def inspect(self, tensor: LogicalTensor, first: int, stored: Stored) -> None:
        """`stored`: elements of `tensor` from index `first`, 1-D, of the stored dtype."""
        if kind := nonfinite(stored, tensor.dtype):
            with self._changing:
                self.nonfinite[tensor.name] = max(kind, self.nonfinite.get(tensor.name, ""))
        if tensor.name not in self._expected:
            return
        expected = self._expected[tensor.name]
        # as many elements, at most as many times wider as F64 is wider than an 8-bit float
        dtype = STORED[expected.dtype]
        step = direct.BLOCK_BYTES // 2 // dtype.itemsize
        for begin in range(0, stored.size, step):
            part = stored[begin : begin + step]
            other = direct.buffer("expected")[: part.size * dtype.itemsize].view(dtype)
            reading.fill(expected, first + begin, first + begin + part.size, other)
            if tensor.dtype != expected.dtype or not np.array_equal(_bits(part), _bits(other)):
                found = difference(part, tensor.dtype, other, expected.dtype, self._tolerance)
                with self._changing:
                    self.differences[tensor.name] = self.differences.get(tensor.name, Difference()) + found


def difference(left: Stored, left_dtype: str, right: Stored, right_dtype: str, tolerance: float) -> Difference:
    """The difference of two 1-D arrays of the same size, each of its stored dtype."""
    total = Difference()
    for first in range(0, left.size, _CACHED_ELEMENTS):
        a, b = left[first : first + _CACHED_ELEMENTS], right[first : first + _CACHED_ELEMENTS]
        with np.errstate(invalid="ignore", over="ignore"):
            gap = np.abs(_numbers(a, left_dtype) - _numbers(b, right_dtype))
        changed = np.ones(a.size, bool) if left_dtype != right_dtype else _bits(a) != _bits(b)
        beyond = changed if left_dtype == right_dtype and not tolerance else changed & ~(gap <= tolerance)
        total += Difference(int(np.count_nonzero(beyond)), float(gap[changed].max(initial=0.0)))
    return total


def _bits(stored: Stored) -> Stored:
    return stored.view(f"u{stored.itemsize}")


def _numbers(stored: Stored, dtype: str) -> NDArray[np.float64]:
    if dtype in ARITHMETIC:
        return widen(stored, dtype).astype(np.float64)
    return np.full(stored.size, math.nan) if dtype in FLOATING else stored.astype(np.float64)
