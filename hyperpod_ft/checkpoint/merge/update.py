"""The arithmetic of a merge, for any range of a weight: W + scale * (B @ A), and DoRA's rescaling.

The steps are those of PEFT 0.17 when it merges on a CPU with factors in fp32, to which it converts 16-bit factors on
loading (`autocast_adapter_dtype`): multiply the factors, multiply by the scale, add the weight, and round once to the
weight's dtype (tuners/lora/layer.py, `get_delta_weight` and `merge`; variants.py, `merge_unsafe`). For a weight in
fp64, all of this is done in fp64. Except with DoRA, an embedding's update is rounded to its dtype before it is added.

Accuracy: a result differs from the exact one by at most the final rounding to the dtype, the rounding of the sum with
the weight, and gamma(r + 2) * |scale| * (|B| @ |A|), with gamma(n) = n u / (1 - n u), rank r and the unit roundoff u of
fp32 (2**-24). This holds for every order of summation (Higham, Accuracy and Stability of Numerical Algorithms, 2nd
edition, section 3.1), so PEFT's result satisfies the same bound, and the two differ by at most twice as much: one
unit in the last place of the dtype, and twice the error of the fp32 sum. Rounding an embedding's update and DoRA's
rescaling add to the bound. A weight in fp64 has u = 2**-53.

Order: the order of summation of an element depends neither on the range that is filled nor on the number of threads.
The product is cut into tiles at fixed positions of the weight, and each tile is always multiplied as a whole; norms are
summed row by row. The order within a tile is that of numpy's BLAS, which has kernels for several kinds of processor:
the last bits may differ if it chooses a different kernel.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyperpod_ft.checkpoint.adapters.lora import Update
from hyperpod_ft.checkpoint.tensors.direct import BLOCK_BYTES
from hyperpod_ft.checkpoint.tensors.elements import STORED, Floats, Stored, narrow, widen
from hyperpod_ft.checkpoint.tensors.layout import LogicalTensor
from hyperpod_ft.checkpoint.tensors.reading import Reader
from hyperpod_ft.checkpoint.tensors.scratch import scratch
from hyperpod_ft.errors import UserError

# Elements computed at a time: an fp32 block of them stays in the core's own cache through all passes.
_BLOCK_ELEMENTS = 1 << 17
# Rows of the weight multiplied at a time. BLAS kernels may sum the rows of one call in different orders
# (OpenBLAS 0.3.31 does for AVX2), so a row must not move within its tile: tiles begin at multiples of this.
_TILE = 16
# OpenBLAS copies (packs) the factors before it multiplies them, unless a call has at most this many multiplications.
# For small ranks, calls below that limit are up to 1.7 times as fast; for larger ranks, one call per row of tiles is
# faster.
_UNPACKED = 1_000_000
_UNPACKED_RANK = 192


@dataclass(frozen=True)
class _Product:
    """left @ right, in the shape of the stored weight."""

    left: Floats  # (rows, r), times the scale; zero rows pad the last tile
    right: Floats  # (r, columns)

    def rows(self, first: int, last: int, use: str) -> Floats:
        """Rows [first, last), contiguous. Valid until the next call with the same `use` in this thread."""
        begin, end = first // _TILE * _TILE, _padded(last)
        out = scratch(use, (end - begin, self.right.shape[1]), self.left.dtype)
        width = self._columns_of_a_call()
        for row in range(begin, end, _TILE):
            for column in range(0, out.shape[1], width):
                columns = slice(column, column + width)
                tile = out[row - begin : row - begin + _TILE, columns]
                np.matmul(self.left[row : row + _TILE], self.right[:, columns], out=tile)
        return out[first - begin : last - begin]

    def _columns_of_a_call(self) -> int:
        rank, columns = len(self.right), len(self.right[0])
        if rank > _UNPACKED_RANK:
            return columns
        calls = -(-columns * rank * _TILE // _UNPACKED)
        return _padded(-(-columns // calls))


class Updated:
    """A weight with updates added; `fill` computes any range of the result as `dtype`. Thread-safe.

    Factors are read for the first element and released after the last: `fill` must be called exactly once for each
    element.
    """

    def __init__(self, reader: Reader, weight: LogicalTensor, updates: Sequence[Update], dtype: str) -> None:
        self._reader = reader
        self._weight = weight
        self._updates = updates
        self._dtype = dtype
        self._rows = weight.shape[0]
        self._columns = weight.elements // max(1, self._rows)
        self._remaining = weight.elements
        self._products: list[_Product] = []
        self._magnitude: Floats | None = None
        self._norms: Floats | None = None  # of columns
        self._changing = threading.Lock()

    def fill(self, begin: int, end: int, out: Stored) -> None:
        """Write elements [begin, end) to `out`, 1-D. Raises UserError when one is NaN or Inf."""
        # NumPy's overflow warnings are off: NaN and Inf are refused below
        with np.errstate(all="ignore"), self._loaded(end - begin):
            columns = self._columns
            for first, last in self._chunks(begin // columns, -(-end // columns)):
                stored = self._borrow(first, last)
                for low, high in self._blocks(first, last):
                    total = self._sum(low, high, stored[low - first : high - first]).reshape(-1)
                    # the range may cover only part of the first and the last row
                    start, stop = max(begin, low * columns), min(end, high * columns)
                    part = total[start - low * columns : stop - low * columns]
                    if kind := narrow(part, self._dtype, out[start - begin : stop - begin]):
                        tensor = f"tensor {self._weight.name} merged as {self._dtype}"
                        raise UserError(
                            f"{self._updates[0].where}: {tensor} holds {kind}",
                            "use a wider dtype; if it remains, the adapter or the base model is damaged",
                        )

    @contextmanager
    def _loaded(self, elements: int) -> Iterator[None]:
        with self._changing:
            if not self._products:
                self._load()
        yield
        with self._changing:
            self._remaining -= elements
            if self._remaining <= 0:
                self._products, self._magnitude, self._norms = [], None, None

    def _load(self) -> None:
        number = np.dtype(np.float64 if self._weight.dtype == "F64" else np.float32)
        self._products = [_product(self._reader, update, number) for update in self._updates]
        (update,) = self._updates if len(self._updates) == 1 else (None,)
        if update and update.magnitude:
            self._magnitude = _floats(self._reader, update.magnitude, number)
            self._norms = self._column_norms() if update.transposed else None

    def _chunks(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The parts of rows [first, last) that are read at a time."""
        rows = max(1, BLOCK_BYTES // max(1, self._columns * STORED[self._weight.dtype].itemsize))
        return _cut(first, last, rows // _TILE * _TILE or rows)

    def _borrow(self, first: int, last: int) -> Stored:
        """Rows of the weight as stored, valid until this thread reads again."""
        found = self._reader.borrow(self._weight, first * self._columns, last * self._columns)
        return found.reshape(last - first, self._columns)

    def _blocks(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        return _cut(first, last, _padded(max(1, _BLOCK_ELEMENTS // max(1, self._columns))))

    def _sum(self, first: int, last: int, stored: Stored) -> Floats:
        total = self._added(first, last, stored)
        if self._magnitude is not None:
            if self._norms is not None:
                total *= self._magnitude / self._norms
            else:
                total *= (self._magnitude[first:last] / _row_norms(total))[:, None]
        return total

    def _added(self, first: int, last: int, stored: Stored) -> Floats:
        """The sum of weight and updates, (last - first, columns)."""
        total = self._products[0].rows(first, last, "update")
        for product in self._products[1:]:
            total += product.rows(first, last, "further update")
        values = scratch("weight", stored.shape, total.dtype)
        if self._updates[0].embedding and self._magnitude is None:
            rounded = scratch("rounded", stored.shape, STORED[self._dtype])
            narrow(total, self._dtype, rounded)
            back = widen(rounded, self._dtype, total if total.dtype == np.float32 else None)
            total = back.astype(total.dtype, copy=False)
        total += widen(stored, self._weight.dtype, values)
        return total

    def _column_norms(self) -> Floats:
        sums = np.zeros(self._columns, self._products[0].left.dtype)
        for low, high in self._blocks(0, self._rows):
            for row in self._added(low, high, self._borrow(low, high)):
                sums += row * row
        return np.sqrt(sums)


def _row_norms(values: Floats) -> Floats:
    """The norm of each row. numpy sums each contiguous row pairwise, the same way on every processor."""
    squares = scratch("squares", values.shape, values.dtype)
    np.multiply(values, values, out=squares)
    norms: Floats = np.sqrt(squares.sum(axis=1))
    return norms


def _product(reader: Reader, update: Update, number: np.dtype[Any]) -> _Product:
    b = _floats(reader, update.b, number)
    a = np.ones((1, 1), number) if update.a is None else _floats(reader, update.a, number)
    b = b.reshape(b.shape[0], -1)
    left, right = (a.T, b.T) if update.transposed else (b, a)
    scaled = np.zeros((_padded(left.shape[0]), left.shape[1]), number)
    np.multiply(left, number.type(update.scale), out=scaled[: left.shape[0]])
    return _Product(scaled, np.ascontiguousarray(right))


def _floats(reader: Reader, tensor: LogicalTensor, number: np.dtype[Any]) -> Floats:
    return reader.floats(tensor).astype(number, copy=False)


def _cut(first: int, last: int, step: int) -> Iterator[tuple[int, int]]:
    """The parts of [first, last) between multiples of `step`."""
    return ((max(low, first), min(low + step, last)) for low in range(first // step * step, last, step))


def _padded(size: int) -> int:
    return -(-size // _TILE) * _TILE
