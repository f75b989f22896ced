"""The arithmetic of a merge, any range of a weight at a time: W + scale * (B @ A), and DoRA's rescaling.

The order of operations is that of PEFT 0.17 when it merges on a CPU with factors in fp32, to which it converts those
of 16 bits on loading (`autocast_adapter_dtype`): multiply the factors, multiply by the scale, add the weight, and round
once to the weight's dtype (tuners/lora/layer.py, `get_delta_weight` and `merge`; variants.py, `merge_unsafe`). A weight
in fp64 has all of it done in fp64.

What is added to an embedding is rounded to its dtype before that too, except by DoRA.

Sums are made in the order of torch on x86, so that the bits are the same: products in that of its BLAS (MKL), for each
element a chain of fused multiply-adds over the rank, as far as `_spans` goes; norms in that of `torch.linalg.norm`.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from hyperpod_ft.checkpoint.adapters.lora import Update
from hyperpod_ft.checkpoint.tensors.direct import BLOCK_BYTES
from hyperpod_ft.checkpoint.tensors.elements import STORED, Floats, Stored, narrow, widen
from hyperpod_ft.checkpoint.tensors.layout import LogicalTensor
from hyperpod_ft.checkpoint.tensors.reading import Reader
from hyperpod_ft.checkpoint.tensors.scratch import scratch
from hyperpod_ft.errors import UserError

# Elements that are computed together: an fp32 block of them stays in the core's own cache through all passes.
_BLOCK_ELEMENTS = 1 << 17
# What OpenBLAS multiplies without packing it first, in multiplications; for the ranks of LoRA twice as fast.
_UNPACKED = 1_000_000
# OpenBLAS has kernels for the edges of a matrix that sum in another order: factors are padded to whole tiles.
_TILE = 16
# torch sums squares of a row in as many interleaved parts.
_LANES = 8
# As far as MKL sums in one chain.
_CHAIN = 192


def _spans(rank: int) -> Iterator[tuple[int, int]]:
    """The parts of the rank that MKL sums by themselves: two halves, or full ones and what is left."""
    step = -(-rank // 2) if _CHAIN < rank <= 2 * _CHAIN else _CHAIN
    return ((begin, min(begin + step, rank)) for begin in range(0, rank, step))


@dataclass(frozen=True)
class _Product:
    """scale * (left @ right), padded, for rows [first, last) of the weight as it is stored."""

    left: Floats  # (rows, r)
    right: Floats  # (r, columns)
    scale: float

    def rows(self, first: int, last: int, use: str) -> Floats:
        """Valid until the next call with the same `use` in this thread. Of shape (last - first, padded columns)."""
        tall = _padded(last - first)
        left, spans = self.left[first : first + tall], list(_spans(self.right.shape[0]))
        out = scratch(use, (tall, self.right.shape[1]), self.left.dtype)
        for begin, end in spans:
            part = out if begin == 0 else scratch("span", out.shape, out.dtype)
            _multiply(left[:, begin:end], self.right[begin:end], part)
            if begin:
                out += part
        if self.scale != 1:
            out *= out.dtype.type(self.scale)
        return out[: last - first]


def _multiply(left: Floats, right: Floats, out: Floats) -> None:
    """`out` = left @ right, tile by tile."""
    most = max(1, _UNPACKED // (_TILE * left.shape[1]))
    wide = _padded(-(-out.shape[1] // -(-out.shape[1] // most)))
    for row in range(0, out.shape[0], _TILE):
        for column in range(0, out.shape[1], wide):
            columns = slice(column, column + wide)
            np.matmul(left[row : row + _TILE], right[:, columns], out=out[row : row + _TILE, columns])


class Updated:
    """A weight with updates added; `fill` gives any range of the result as `dtype`.

    Factors are read when the first element is asked for, and let go with the last: `fill` has to be called once for
    each element. From several threads.
    """

    def __init__(self, reader: Reader, weight: LogicalTensor, updates: Sequence[Update], dtype: str) -> None:
        self._reader = reader
        self._weight = weight
        self._updates = updates
        self._dtype = dtype
        self._rows = weight.shape[0]
        self._columns = weight.elements // max(1, self._rows)
        self._left = weight.elements
        self._products: list[_Product] = []
        self._magnitude: Floats | None = None
        self._norms: Floats | None = None  # of columns
        self._changing = threading.Lock()

    def fill(self, begin: int, end: int, out: Stored) -> None:
        """Elements [begin, end) into `out`, 1-D. Raises UserError when one is NaN or Inf."""
        columns = self._columns
        # what becomes NaN or Inf is refused in the end, and told once
        with np.errstate(all="ignore"), self._loaded(end - begin):
            # whole rows in place, and the rows at both ends, of which others have the rest
            first, last = min(end, -(-begin // columns) * columns), max(begin, end // columns * columns)
            for low, high in pairwise((begin, first, max(first, last), end)):
                row = low // columns
                if (low, high) == (row * columns, high // columns * columns):
                    self._fill_rows(row, high // columns, out[low - begin : high - begin])
                elif low < high:
                    whole = np.empty(columns, out.dtype)
                    self._fill_rows(row, row + 1, whole)
                    out[low - begin : high - begin] = whole[low - row * columns : high - row * columns]

    @contextmanager
    def _loaded(self, elements: int) -> Iterator[None]:
        with self._changing:
            if not self._products:
                self._load()
        yield
        with self._changing:
            self._left -= elements
            if self._left <= 0:
                self._products, self._magnitude, self._norms = [], None, None

    def _load(self) -> None:
        number = np.dtype(np.float64 if self._weight.dtype == "F64" else np.float32)
        self._products = [_product(self._reader, update, number) for update in self._updates]
        (update,) = self._updates if len(self._updates) == 1 else (None,)
        if update and update.magnitude:
            self._magnitude = _floats(self._reader, update.magnitude, number)
            self._norms = self._column_norms() if update.transposed else None

    def _fill_rows(self, first: int, last: int, out: Stored) -> None:
        """Rows [first, last) into `out`."""
        rows = out.reshape(last - first, self._columns)
        for begin, end in self._readings(first, last):
            stored = self._borrow(begin, end)
            for low, high in self._blocks(begin, end):
                total = self._sum(low, high, stored[low - begin : high - begin])
                if kind := narrow(total, self._dtype, rows[low - first : high - first]):
                    raise UserError(
                        f"{self._updates[0].where}: tensor {self._weight.name} merged as {self._dtype} holds {kind}",
                        "the adapter or the base model is broken, or the dtype too narrow",
                    )

    def _readings(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """What is read at once of rows [first, last)."""
        step = max(1, BLOCK_BYTES // max(1, self._columns * STORED[self._weight.dtype].itemsize))
        return ((low, min(low + step, last)) for low in range(first, last, step))

    def _borrow(self, first: int, last: int) -> Stored:
        """Rows of the weight as they are stored, good until this thread reads again."""
        found = self._reader.borrow(self._weight, first * self._columns, last * self._columns)
        return found.reshape(last - first, self._columns)

    def _blocks(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        step = _padded(max(1, _BLOCK_ELEMENTS // max(1, _padded(self._columns))))
        return ((low, min(low + step, last)) for low in range(first, last, step))

    def _sum(self, first: int, last: int, stored: Stored) -> Floats:
        total = self._added(first, last, stored)
        if self._magnitude is not None:
            if self._norms is not None:
                total *= self._magnitude / self._norms
            else:
                total *= (self._magnitude[first:last] / _row_norms(total))[:, None]
        return total

    def _added(self, first: int, last: int, stored: Stored) -> Floats:
        """Weight and updates, of shape (last - first, columns)."""
        total = self._products[0].rows(first, last, "update")
        for product in self._products[1:]:
            total += product.rows(first, last, "further update")
        total = total[:, : self._columns]
        values = scratch("weight", stored.shape, total.dtype)
        if self._updates[0].embedding and self._magnitude is None:
            rounded = scratch("rounded", stored.shape, STORED[self._dtype])
            narrow(total, self._dtype, rounded)
            total = widen(rounded, self._dtype, total)
        total += widen(stored, self._weight.dtype, values)
        return total

    def _column_norms(self) -> Floats:
        sums = np.zeros(self._columns, self._products[0].left.dtype)
        for low, high in self._blocks(0, self._rows):
            for row in self._added(low, high, self._borrow(low, high)):
                sums += row * row
        return np.sqrt(sums)


def _row_norms(values: Floats) -> Floats:
    """Of each row: sums of every eighth square, these one after another, and the rest."""
    rows, columns = values.shape
    whole = columns // _LANES * _LANES
    squares = values * values
    lanes = np.ascontiguousarray(squares[:, :whole].reshape(rows, -1, _LANES).transpose(1, 0, 2)).sum(axis=0)
    sums: Floats = np.zeros(rows, values.dtype)
    for column in (*lanes.T, *squares[:, whole:].T):
        sums += column
    return np.sqrt(sums)


def _product(reader: Reader, update: Update, number: np.dtype[Any]) -> _Product:
    b = _floats(reader, update.b, number)
    a = np.ones((1, 1), number) if update.a is None else _floats(reader, update.a, number)
    b = b.reshape(b.shape[0], -1)
    left, right = (a.T, b.T) if update.transposed else (b, a)
    padded = np.zeros((_padded(left.shape[0]) + _TILE, left.shape[1]), number)
    padded[: left.shape[0]] = left
    wide = np.zeros((right.shape[0], _padded(right.shape[1])), number)
    wide[:, : right.shape[1]] = right
    if np.frexp(update.scale)[0] == 0.5:
        # a power of two: the same product, short of over- and underflow, without a pass of its own
        padded *= number.type(update.scale)
        return _Product(padded, wide, 1.0)
    return _Product(padded, wide, update.scale)


def _floats(reader: Reader, tensor: LogicalTensor, number: np.dtype[Any]) -> Floats:
    return reader.floats(tensor).astype(number, copy=False)


def _padded(size: int) -> int:
    return -(-size // _TILE) * _TILE
