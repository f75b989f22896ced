"""A tensor of the merged model, any range of which can be computed: W + scale * (B @ A), and DoRA's rescaling.

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

A new kind of update is a field of `Update` (adapters/lora.py), read in `_read_factors` and applied in
`MergedTensor._merged_rows`. A base in another format is read in `MergedTensor._weight`.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from hyperpod_ft.checkpoint.adapters.experts import ExpertSlice
from hyperpod_ft.checkpoint.adapters.lora import Update
from hyperpod_ft.checkpoint.tensors import direct, reading
from hyperpod_ft.checkpoint.tensors.elements import STORED, Floats, Stored, narrow, refuse_nonfinite, widen
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.errors import UserError

# Elements computed at a time: an fp32 block of them stays in the core's own cache through all passes.
_BLOCK_ELEMENTS = 1 << 17
# Rows of the weight multiplied at a time. BLAS kernels may sum the rows of one call in different orders
# (OpenBLAS 0.3.31 does for AVX2), so a row must not move within its tile: tiles begin at multiples of this.
_TILE = 16


@dataclass(frozen=True)
class _Factors:
    """The factors of one update, read from its files; the update is left @ right, in the shape of the stored weight."""

    left: Floats  # (rows, r), times the scale; zero rows pad the last tile
    right: Floats  # (r, columns)
    magnitude: Floats | None  # DoRA's, (out,)

    def multiply(self, first: int, last: int) -> Floats:
        """Rows [first, last) of the product, contiguous."""
        begin, end = first // _TILE * _TILE, _padded(last)
        out = np.empty((end - begin, self.right.shape[1]), self.left.dtype)
        for row in range(begin, end, _TILE):
            np.matmul(self.left[row : row + _TILE], self.right, out=out[row - begin : row - begin + _TILE])
        return out[first - begin : last - begin]


class SharedFactors:
    """The last few factors of all experts that were read: each expert needs a part of every row of lora_B."""

    def __init__(self) -> None:
        self._read = lru_cache(maxsize=4)(_floats)  # gate_up_proj and down_proj of two layers
        self._reading = threading.Lock()

    def read(self, tensor: LogicalTensor, number: np.dtype[Any]) -> Floats:
        with self._reading:
            return self._read(tensor, number)


@dataclass(eq=False)
class MergedTensor:
    """A tensor of the merged model: `source`, of the base or trained whole by an adapter, with `updates` added.

    `fill` must be called exactly once for each element: factors are read for the first and released after the last.
    """

    source: LogicalTensor
    updates: tuple[Update, ...] = ()
    shared: SharedFactors = field(default_factory=SharedFactors)
    _of_experts: tuple["MergedTensor", ...] = field(init=False, default=())
    _loaded: list[_Factors] = field(init=False, default_factory=list)
    _norms: Floats | None = field(init=False, default=None)  # of columns, for DoRA on a transposed weight
    _remaining: int = field(init=False)
    _changing: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._remaining = self.source.elements
        if any(update.experts for update in self.updates) and len(self.source.shape) == 3:
            self._of_experts = tuple(map(self._of_expert, range(self.source.shape[0])))

    def _of_expert(self, expert: int) -> "MergedTensor":
        _, *shape = self.source.shape
        one = self.source.part((expert, 0, 0), (1, *shape)).with_axes((1, 2))
        updates = (replace(each, experts=replace(each.experts, expert=expert)) for each in self.updates if each.experts)
        return MergedTensor(one, tuple(updates), self.shared)

    @property
    def is_idle(self) -> bool:
        """Whether it is the matrix of an expert whose lora_B is zero: no token reached the expert in training."""
        number = np.dtype(np.float32)
        return bool(self.updates) and not any(
            update.experts is None
            or self.shared.read(update.b, number)[:, update.experts.expert :: update.experts.count].any()
            for update in self.updates
        )

    @property
    def _columns(self) -> int:
        return self.source.elements // max(1, self.source.shape[0])

    def fill(self, dtype: str, begin: int, end: int, out: Stored) -> None:
        """Write elements [begin, end) to `out`, 1-D, rounded once to `dtype`. Thread-safe.

        Raises UserError when one is NaN or Inf, or a file cannot be read.
        """
        if self._of_experts:
            size = self._columns
            for expert in range(begin // size, -(-end // size)):
                low, high = max(begin, expert * size), min(end, (expert + 1) * size)
                part = out[low - begin : high - begin]
                self._of_experts[expert].fill(dtype, low - expert * size, high - expert * size, part)
            return
        if self.updates:
            self._fill_updated(dtype, begin, end, out)
            return
        reading.fill_as(self.source, dtype, begin, end, out)
        where = f"{self.source.pieces[0].file}: as {dtype}"
        refuse_nonfinite(out, dtype, self.source.name, where, "restore the file, or use a wider dtype")

    def _fill_updated(self, dtype: str, begin: int, end: int, out: Stored) -> None:
        columns = self._columns
        first, last = begin // columns, -(-end // columns)
        # NumPy's overflow warnings are off: NaN and Inf are refused below
        with np.errstate(all="ignore"), self._loading(end - begin) as factors:
            weight = self._weight(first, last)
            for low, high in self._blocks(first, last):
                total = self._merged_rows(factors, low, high, weight[low - first : high - first], dtype).reshape(-1)
                # the range may cover only part of the first and the last row
                start, stop = max(begin, low * columns), min(end, high * columns)
                part = total[start - low * columns : stop - low * columns]
                if kind := narrow(part, dtype, out[start - begin : stop - begin]):
                    raise UserError(
                        f"{self.updates[0].where}: tensor {self.source.name} merged as {dtype} holds {kind}",
                        "use a wider dtype; if it remains, the adapter or the base model is damaged",
                    )

    def _weight(self, first: int, last: int) -> Stored:
        """Rows [first, last) of the source, (last - first, columns), as stored; valid until this thread's next call."""
        dtype = STORED[self.source.dtype]
        begin, end = first * self._columns, last * self._columns
        nbytes = (end - begin) * dtype.itemsize
        stored = direct.buffer("weight", nbytes)[:nbytes].view(dtype)
        reading.fill(self.source, begin, end, stored)
        return stored.reshape(last - first, self._columns)

    @contextmanager
    def _loading(self, elements: int) -> Iterator[list[_Factors]]:
        """The factors of all updates, while `elements` are computed."""
        with self._changing:
            if not self._loaded:
                number = np.dtype(np.float64 if self.source.dtype == "F64" else np.float32)
                rows = self.source.shape[0]
                self._loaded = [
                    _read_expert_factors(update, update.experts, number, rows, self.shared)
                    if update.experts
                    else _read_factors(update, number)
                    for update in self.updates
                ]
                if self._loaded[0].magnitude is not None and self.updates[0].transposed:
                    self._norms = self._column_norms(self._loaded)
            loaded = self._loaded
        yield loaded
        with self._changing:
            self._remaining -= elements
            if self._remaining <= 0:
                self._loaded, self._norms = [], None

    def _merged_rows(self, factors: list[_Factors], first: int, last: int, stored: Stored, dtype: str) -> Floats:
        """Rows [first, last) of the result before rounding, (last - first, columns)."""
        total = self._weight_plus_updates(factors, first, last, stored, dtype)
        magnitude = factors[0].magnitude  # of the only update: DoRA's cannot be added to others
        if magnitude is None:
            return total
        if self._norms is not None:
            total *= magnitude / self._norms
            return total
        # numpy sums each contiguous row pairwise, the same way on every processor
        total *= (magnitude[first:last] / np.sqrt((total * total).sum(axis=1)))[:, None]
        return total

    def _weight_plus_updates(
        self, factors: list[_Factors], first: int, last: int, stored: Stored, dtype: str
    ) -> Floats:
        """The sum of weight and updates, (last - first, columns)."""
        total = factors[0].multiply(first, last)
        for further in factors[1:]:
            total += further.multiply(first, last)
        if self.updates[0].embedding and factors[0].magnitude is None:
            rounded = np.empty(total.shape, STORED[dtype])
            narrow(total, dtype, rounded)
            total = widen(rounded, dtype).astype(total.dtype, copy=False)
        total += widen(stored, self.source.dtype)
        return total

    def _column_norms(self, factors: list[_Factors]) -> Floats:
        sums = np.zeros(self._columns, factors[0].left.dtype)
        for low, high in self._blocks(0, self.source.shape[0]):
            for row in self._weight_plus_updates(factors, low, high, self._weight(low, high), self.source.dtype):
                sums += row * row
        norms: Floats = np.sqrt(sums)
        return norms

    def _blocks(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The parts of rows [first, last) between multiples of a block's rows."""
        step = _padded(max(1, _BLOCK_ELEMENTS // max(1, self._columns)))
        return ((max(low, first), min(low + step, last)) for low in range(first // step * step, last, step))


def _read_factors(update: Update, number: np.dtype[Any]) -> _Factors:
    b = _floats(update.b, number)
    a = np.ones((1, 1), number) if update.a is None else _floats(update.a, number)
    b = b.reshape(b.shape[0], -1)
    left, right = (a.T, b.T) if update.transposed else (b, a)
    magnitude = _floats(update.magnitude, number) if update.magnitude else None
    return _factors(left, right, update.scale, magnitude)


def _read_expert_factors(
    update: Update, experts: ExpertSlice, number: np.dtype[Any], rows: int, shared: SharedFactors
) -> _Factors:
    """Those of one expert's matrix, of this many rows."""
    assert update.a is not None and experts.expert is not None
    rank, width = update.a.shape[0] // experts.count, update.a.shape[1]
    a = _floats(update.a.part((experts.expert * rank, 0), (rank, width)), number)
    b = shared.read(update.b, number)[:, experts.expert :: experts.count]
    left, right = (a.T, b.T) if update.transposed else (b, a)
    return _factors(left[experts.row : experts.row + rows], right, update.scale, None)


def _factors(left: Floats, right: Floats, scale: float, magnitude: Floats | None) -> _Factors:
    number = left.dtype
    scaled = np.zeros((_padded(left.shape[0]), left.shape[1]), number)
    np.multiply(left, number.type(scale), out=scaled[: left.shape[0]])
    return _Factors(scaled, np.ascontiguousarray(right), magnitude)


def _floats(tensor: LogicalTensor, number: np.dtype[Any]) -> Floats:
    return widen(reading.read(tensor), tensor.dtype).astype(number, copy=False)


def _padded(size: int) -> int:
    return -(-size // _TILE) * _TILE
