"""Converts half precision (F16) to float32 and back with whole-array operations; numpy converts element by element.

Half has 5 exponent bits and 10 mantissa bits, float32 has 8 and 23: a shift by 13 aligns the bits of one with the
other, and their exponent biases differ by 112.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperpod_ft.checkpoint.tensors.scratch import scratch

_BIAS = 112
# The bit pattern of the smallest normal half as float32, without its sign.
_NORMAL = np.float32(2.0**-14).view(np.uint32) << 1


def widen(stored: NDArray[np.float16], out: NDArray[Any]) -> None:
    """Write the exact values to `out`, float32."""
    bits = out.view(np.int32)
    np.copyto(bits, stored.view(np.int16))  # the sign fills the upper half
    np.left_shift(bits, 13, out=bits)
    np.bitwise_and(bits, ~0x7000_0000, out=bits)
    # this also gives subnormal numbers their value
    np.multiply(out, np.float32(2.0**_BIAS), out=out)
    if out.size and max(out.max(), -out.min()) >= 65536:  # infinity and NaN
        np.copyto(out, stored)


def narrow(values: NDArray[Any], out: NDArray[np.float16]) -> None:
    """Round float32 to nearest, ties to even; no value may round to infinity (65520 or more)."""
    bits = values.view(np.uint32)
    carry = scratch("carry", bits.shape, bits.dtype)
    # adding half of the removed part, less one if the kept part is even, carries when it must round up
    np.right_shift(bits, 13, out=carry)
    np.bitwise_and(carry, 1, out=carry)
    np.add(carry, 0xFFF, out=carry)
    np.add(carry, bits, out=carry)
    sign = scratch("sign", bits.shape, bits.dtype)
    np.bitwise_and(carry, 0x8000_0000, out=sign)
    np.right_shift(sign, 16, out=sign)
    np.right_shift(carry, 13, out=carry)
    np.subtract(carry, _BIAS << 10, out=carry)
    np.bitwise_and(carry, 0x7FFF, out=carry)
    np.bitwise_or(carry, sign, out=carry)
    np.copyto(out.view(np.uint16), carry, casting="unsafe")
    np.left_shift(bits, 1, out=sign)
    small = np.flatnonzero(sign < _NORMAL)
    np.put(out, small, np.take(values, small).astype(np.float16))
