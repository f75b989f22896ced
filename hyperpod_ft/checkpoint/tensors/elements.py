"""Elements as stored bits and as numbers: support for bfloat16 and the 8-bit floats, which numpy lacks.

A stored array has a numpy dtype of the same width: uint16 for BF16, uint8 for the F8 formats, and its own dtype
otherwise. Temporaries are no larger than the caller's block.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperpod_ft.checkpoint.tensors.logical_tensor import NUMPY_CODE
from hyperpod_ft.errors import UserError

Stored = NDArray[Any]
Floats = NDArray[np.floating[Any]]

STORED: dict[str, np.dtype[Any]] = {name: np.dtype(code) for name, code in NUMPY_CODE.items()}
# The dtypes that can be computed with. The value of an 8-bit float depends on a scale that is stored elsewhere.
ARITHMETIC = frozenset({"F64", "F32", "F16", "BF16"})

# By dtype: integers of the same width, and the bit pattern of infinity, which every NaN of the same sign exceeds. E4M3
# (the "fn" variant) has no infinity, and its NaN is all ones.
_INFINITY: dict[str, tuple[str, str, int]] = {
    "F64": ("<i8", "<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<i4", "<u4", 0x7F80_0000),
    "F16": ("<i2", "<u2", 0x7C00),
    "BF16": ("<i2", "<u2", 0x7F80),
    "F8_E4M3": ("i1", "u1", 0x7F),
    "F8_E5M2": ("i1", "u1", 0x7C),
}
# From this value on, numbers round to infinity: half a step beyond the largest number.
_OVERFLOW = {"F64": math.inf, "F32": 2.0**128 - 2.0**103, "F16": 65520.0, "BF16": 2.0**128 - 2.0**119}
_BLOCK_ELEMENTS = 1 << 16  # one pass and its temporaries fit in the core's own cache


def widen(stored: Stored, dtype: str) -> Floats:
    """The exact values: float32, or float64 for F64. Possibly `stored` itself."""
    if dtype in ("F32", "F64"):
        return stored
    if dtype not in ARITHMETIC:
        raise ValueError(f"no arithmetic on {dtype}")
    values: Floats = np.empty(stored.shape, np.float32)
    if dtype == "BF16":
        bits = values.view(np.uint32)
        np.copyto(bits, stored)
        np.left_shift(bits, 16, out=bits)
    else:
        np.copyto(values, stored)
    return values


def narrow(values: Floats, dtype: str, out: Stored) -> str:
    """Round values once, to nearest, ties to even, into `out` of the same shape.

    float64 becomes BF16 by way of float32, as in torch. Returns `NaN` or `Inf` if `out` holds one afterwards, otherwise
    an empty string.
    """
    kind = _rounds_to(values, dtype)
    if dtype != "BF16":
        with np.errstate(over="ignore"):
            np.copyto(out, values, casting="same_kind")
        return kind
    # Keep the upper half of float32. Adding 0x7FFF, plus one if the kept part is odd, carries when it must round up,
    # into the exponent too if needed.
    bits = values.astype(np.float32, copy=False).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    np.copyto(out, rounded, casting="unsafe")
    if kind == "NaN":
        # the carry may have overflowed a NaN into its sign
        np.copyto(out, 0x7FC0, where=np.isnan(values))
    return kind


def _rounds_to(values: Floats, dtype: str) -> str:
    if not values.size:
        return ""
    largest, smallest = float(values.max()), float(values.min())
    if math.isnan(largest):
        return "NaN"
    return "Inf" if max(largest, -smallest) >= _OVERFLOW[dtype] else ""


def convert(stored: Stored, dtype: str, to: str, out: Stored) -> None:
    """Convert `stored` from `dtype` to `to`, rounded once, into `out`; both 1-D."""
    if dtype == to:
        np.copyto(out, stored)
        return
    for first in range(0, stored.size, _BLOCK_ELEMENTS):
        block = slice(first, first + _BLOCK_ELEMENTS)
        narrow(widen(stored[block], dtype), to, out[block])


def nonfinite(stored: Stored, dtype: str) -> str:
    """`NaN` or `Inf` if one is present, otherwise empty; always empty for integers."""
    if dtype not in _INFINITY or not stored.size:
        return ""
    signed, unsigned, infinity = _INFINITY[dtype]
    negative = 1 << (8 * stored.itemsize - 1)
    bits = np.ascontiguousarray(stored)
    # as signed integers the positive numbers are largest, as unsigned integers the negative ones
    largest = max(int(bits.view(signed).max()), int(bits.view(unsigned).max()) - negative)
    if largest < infinity:
        return ""
    return "NaN" if dtype == "F8_E4M3" or largest > infinity else "Inf"


def refuse_nonfinite(stored: Stored, dtype: str, name: str, where: str, remedy: str) -> None:
    """Raise UserError when `stored` holds a NaN or an infinity."""
    if kind := nonfinite(stored, dtype):
        raise UserError(f"{where}: tensor {name} holds {kind}", remedy)
