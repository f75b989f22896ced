"""Elements as they are stored, and as numbers: what numpy lacks for bfloat16 and the 8-bit floats.

A stored array has the dtype of the same width that numpy knows: BF16 is uint16, the F8 formats are uint8, all else is
itself. Nothing here is larger than the caller's block; temporaries are as large as it.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Stored = NDArray[Any]
Floats = NDArray[np.floating[Any]]

STORED: dict[str, np.dtype[Any]] = {
    name: np.dtype(code)
    for name, code in {
        "F64": "<f8",
        "F32": "<f4",
        "F16": "<f2",
        "BF16": "<u2",
        "F8_E4M3": "u1",
        "F8_E5M2": "u1",
        "I64": "<i8",
        "I32": "<i4",
        "I16": "<i2",
        "I8": "i1",
        "U64": "<u8",
        "U32": "<u4",
        "U16": "<u2",
        "U8": "u1",
        "BOOL": "?",
    }.items()
}
# Those that arithmetic is done on. An 8-bit float only has a value together with a scale that is stored elsewhere.
ARITHMETIC = frozenset({"F64", "F32", "F16", "BF16"})

# By dtype: the unsigned integer of its width, the bits besides the sign, and the pattern of infinity, which every NaN
# exceeds. E4M3 (the "fn" kind) has no infinity, and NaN is all ones.
_NONFINITE: dict[str, tuple[str, int, int]] = {
    "F64": ("<u8", 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7FFF_FFFF, 0x7F80_0000),
    "F16": ("<u2", 0x7FFF, 0x7C00),
    "BF16": ("<u2", 0x7FFF, 0x7F80),
    "F8_E4M3": ("u1", 0x7F, 0x7F),
    "F8_E5M2": ("u1", 0x7F, 0x7C),
}
_CACHED_ELEMENTS = 1 << 16  # a pass and its temporaries stay in the core's own cache


def widen(stored: Stored, dtype: str) -> Floats:
    """The values, exact: float32, or float64 of F64. May be `stored` itself."""
    if dtype == "BF16":
        bits = stored.astype(np.uint32)
        np.left_shift(bits, 16, out=bits)
        return bits.view(np.float32)
    if dtype == "F16":
        return stored.astype(np.float32)
    if dtype in ("F32", "F64"):
        return stored
    raise ValueError(f"no arithmetic on {dtype}")


def narrow(values: Floats, dtype: str, out: Stored) -> None:
    """Round values once, to nearest, ties to even, into `out` of the same shape."""
    if dtype != "BF16":
        with np.errstate(over="ignore"):  # overflow becomes an infinity, which is found by the bits
            np.copyto(out, values, casting="same_kind")
        return
    # float32 to its upper half: adding 0x7FFF, and one more when the kept part is odd, carries where it rounds up.
    # The carry runs into the exponent as it should; a NaN is kept one by not being touched.
    bits = values.astype(np.float32, copy=False).view(np.uint32)
    carry = np.right_shift(bits, 16)
    np.bitwise_and(carry, 1, out=carry)
    np.add(carry, 0x7FFF, out=carry)
    np.add(carry, bits, out=carry)
    np.right_shift(carry, 16, out=carry)
    np.copyto(out, carry, casting="unsafe")
    if nonfinite(values, "F32" if values.dtype == np.float32 else "F64") == "NaN":
        np.copyto(out, 0x7FC0, where=np.isnan(values))


def convert(stored: Stored, dtype: str, to: str, out: Stored) -> None:
    """`stored` of `dtype` as `to`, rounded once."""
    if dtype == to:
        np.copyto(out, stored)
    else:
        narrow(widen(stored, dtype), to, out)


def nonfinite(stored: Stored, dtype: str) -> str:
    """`NaN` or `Inf` when there is one, else empty; always empty for integers."""
    if dtype not in _NONFINITE:
        return ""
    width, mask, infinity = _NONFINITE[dtype]
    flat = np.ascontiguousarray(stored).reshape(-1).view(width)
    scratch = np.empty(min(_CACHED_ELEMENTS, flat.size), flat.dtype)
    largest = 0
    for first in range(0, flat.size, _CACHED_ELEMENTS):
        part = flat[first : first + _CACHED_ELEMENTS]
        largest = max(largest, int(np.bitwise_and(part, mask, out=scratch[: part.size]).max()))
    if largest < infinity:
        return ""
    return "NaN" if dtype == "F8_E4M3" or largest > infinity else "Inf"
