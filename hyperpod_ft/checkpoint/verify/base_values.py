"""Compares the values of a tuned model with its base's, and with what an adapter makes of them, while they are read.

The adapter's update is computed in float32 from its factors and rounded once to the tuned model's dtype. A program that
adds it in another precision or order gives other last bits, so a part counts as merged when the root mean square (RMS)
of its distance from the expected values is at most `TOLERANCE` of that of the update. Wrong scales, experts exchanged
for others and updates added twice are further away.
"""

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from hyperpod_ft.checkpoint.tensors import direct, reading
from hyperpod_ft.checkpoint.tensors.elements import ARITHMETIC, STORED, Floats, Stored, narrow, widen
from hyperpod_ft.checkpoint.tensors.logical_tensor import DTYPE_BYTES, LogicalTensor
from hyperpod_ft.checkpoint.verify.adapter_effects import Effect
from hyperpod_ft.checkpoint.verify.forms import ModelPart

TOLERANCE = 0.3
# A value rounded to bfloat16 and back is no further off, relative to it.
_ROUNDING = 2.0**-8
_BLOCK_ELEMENTS = 1 << 16  # of arithmetic: temporaries stay in the core's own cache
_KEPT_BYTES = 16 << 20  # of factors: files hold the parts of a layer's experts in any order


@dataclass(slots=True)
class ValueTally:
    """What was found of one pair, over all its elements. Squares are sums; X, the expected values, W, the base's."""

    differs: bool = False  # from W, in any bit
    beyond_rounding: bool = False  # of W
    moved: bool = False  # X differs from W in any bit
    gap: float = 0.0  # |T - X| squared, T being the tuned model's values
    other_gap: float = 0.0  # the same in the other order of experts
    update: float = 0.0  # |X - W| squared
    along: float = 0.0  # (T - W)(X - W)
    length: float = 0.0  # |T - W| squared

    def add(self, other: "ValueTally") -> None:
        self.differs |= other.differs
        self.beyond_rounding |= other.beyond_rounding
        self.moved |= other.moved
        self.gap += other.gap
        self.other_gap += other.other_gap
        self.update += other.update
        self.along += other.along
        self.length += other.length

    @property
    def is_merged(self) -> bool:
        return self.gap <= TOLERANCE**2 * self.update

    @property
    def is_merged_in_other_order(self) -> bool:
        return self.other_gap <= TOLERANCE**2 * self.update

    @property
    def times(self) -> float | None:
        """How many times the update was added; None if something else was."""
        if not self.update or self.along**2 < (1 - TOLERANCE**2) * self.update * self.length:
            return None
        return self.along / self.update


@dataclass(slots=True)
class Pair:
    """The same part of both models. Elements that only one of them has, as of new tokens, are not compared."""

    name: str
    tuned: ModelPart
    base: ModelPart
    effect: Effect | None = None
    tally: ValueTally = field(default_factory=ValueTally)

    @property
    def is_comparable(self) -> bool:
        dtypes = {self.tuned.tensor.dtype, self.base.tensor.dtype}
        return len(dtypes) == 1 or dtypes <= ARITHMETIC

    @property
    def is_expected(self) -> bool:
        """Whether the adapter's values of the part are known."""
        return self.effect is not None and self.effect != Effect() and self.tuned.tensor.dtype in ARITHMETIC


class BaseValues:
    """Fills the tallies of `pairs`; thread-safe. `unsloth`: lora_B of joined experts has Unsloth's order."""

    def __init__(self, pairs: Iterable[Pair], *, unsloth: bool) -> None:
        self._pairs: dict[str, list[Pair]] = {}
        for pair in pairs:
            if pair.is_comparable:
                self._pairs.setdefault(pair.tuned.tensor.name, []).append(pair)
        for of_tensor in self._pairs.values():
            of_tensor.sort(key=lambda pair: pair.tuned.begin)
        self._unsloth = unsloth
        self._floats = _FloatsCache()
        self._changing = threading.Lock()

    def inspect(self, tensor: LogicalTensor, first: int, stored: Stored) -> None:
        """`stored`: elements of a tensor of the tuned model from index `first`, 1-D, of the stored dtype."""
        pairs = self._pairs.get(tensor.name, [])
        start = max(0, bisect_right(pairs, first, key=lambda pair: pair.tuned.begin) - 1)
        for index in range(start, len(pairs)):
            pair = pairs[index]
            low = max(first, pair.tuned.begin)
            high = min(first + stored.size, pair.tuned.begin + pair.tuned.elements)
            if low >= first + stored.size:
                return
            step = _BLOCK_ELEMENTS if pair.is_expected else max(1, direct.BLOCK_BYTES // 2 // DTYPE_BYTES[tensor.dtype])
            for begin in range(low, high, step):
                values = stored[begin - first : min(begin + step, high) - first]
                compare = self._expected if pair.is_expected else self._unexpected
                found = compare(pair, begin - pair.tuned.begin, values)
                with self._changing:
                    pair.tally.add(found)

    def _unexpected(self, pair: Pair, begin: int, tuned: Stored) -> ValueTally:
        """Compared with the base alone. `tuned`: elements of the part from index `begin`."""
        dtype = pair.tuned.tensor.dtype
        tuned = tuned[: max(0, pair.base.elements - begin)]
        base = direct.buffer("base", tuned.nbytes)[: tuned.nbytes].view(STORED[dtype])
        at = pair.base.begin + begin
        reading.fill_as(pair.base.tensor, dtype, at, at + tuned.size, base)
        if _same(tuned, base):
            return ValueTally()
        return ValueTally(
            differs=True, beyond_rounding=pair.tally.beyond_rounding or _beyond_rounding(tuned, base, dtype)
        )

    def _expected(self, pair: Pair, begin: int, tuned: Stored) -> ValueTally:
        """Compared with the adapter's values: in whole rows, of which `tuned` may begin and end with parts."""
        assert pair.effect is not None
        dtype = pair.tuned.tensor.dtype
        columns = pair.tuned.elements // pair.tuned.shape[0]
        rows = range(begin // columns, -(-(begin + tuned.size) // columns))
        weight, base = self._base_rows(pair, rows, columns)
        # rows of new tokens have no weight in the base that an update could be added to, only whole values
        end = begin + tuned.size if pair.effect.whole else min(begin + tuned.size, pair.base.elements)
        tuned, part = tuned[: max(0, end - begin)], slice(begin - rows.start * columns, end - rows.start * columns)
        expected = self._values(pair, rows, weight, by_expert=self._unsloth)[part]
        base = base[part]
        found = ValueTally(differs=not _same(tuned, base), moved=not _same(expected, base))
        if _same(tuned, expected):
            return found
        values, wanted, before = (
            widen(stored, dtype).astype(np.float32, copy=False) for stored in (tuned, expected, base)
        )
        with np.errstate(all="ignore"):
            gap, update, change = values - wanted, wanted - before, values - before
            found.gap = found.other_gap = float(gap @ gap)
            found.update, found.along, found.length = (
                float(one @ other) for one, other in ((update, update), (change, update), (change, change))
            )
            if not found.is_merged and pair.effect.low and pair.effect.low.experts > 1:
                other = self._values(pair, rows, weight, by_expert=not self._unsloth)[part]
                gap = values - widen(other, dtype)
                found.other_gap = float(gap @ gap)
        return found

    def _base_rows(self, pair: Pair, rows: range, columns: int) -> tuple[Floats, Stored]:
        """Rows of the base, 1-D: as they are, and in the tuned model's dtype; zeros after its last one."""
        dtype, source = pair.tuned.tensor.dtype, pair.base.tensor
        size = max(0, min(rows.stop * columns, pair.base.elements) - rows.start * columns)
        stored = np.zeros(len(rows) * columns, STORED[source.dtype])
        at = pair.base.begin + rows.start * columns
        reading.fill(source, at, at + size, stored[:size])
        weight = widen(stored, source.dtype).astype(np.float32, copy=False)
        if source.dtype == dtype:
            return weight, stored
        base = np.empty(weight.size, STORED[dtype])
        narrow(weight, dtype, base)
        return weight, base

    def _values(self, pair: Pair, rows: range, weight: Floats, *, by_expert: bool) -> Stored:
        """The expected elements of `rows`, 1-D, in the tuned model's dtype; `weight`: those of the base."""
        effect, dtype = pair.effect, pair.tuned.tensor.dtype
        assert effect is not None
        out = np.empty(weight.size, STORED[dtype])
        columns = weight.size // len(rows)
        if effect.whole is not None:
            reading.fill_as(effect.whole, dtype, rows.start * columns, rows.stop * columns, out)
            return out
        assert effect.low is not None
        left, right = effect.low.factors(rows, self._floats, by_expert=by_expert)
        total = weight.reshape(len(rows), columns).copy()
        total[: len(left)] += left @ right  # an embedding may have rows for tokens that the adapter did not know
        if effect.magnitude is not None:
            norms = np.sqrt((total * total).sum(axis=1))
            total *= (self._floats(effect.magnitude, rows.start, rows.stop) / norms)[:, None]
        narrow(total.reshape(-1), dtype, out)
        return out


class _FloatsCache:
    """Reads rows of small tensors as float32, and keeps those that were used last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int, int], Floats] = OrderedDict()
        self._reading = threading.Lock()

    def __call__(self, tensor: LogicalTensor, first: int, last: int) -> Floats:
        key = (tensor.name, first, last)
        with self._reading:
            if key not in self._kept:
                while self._kept and sum(one.nbytes for one in self._kept.values()) > _KEPT_BYTES:
                    self._kept.popitem(last=False)
                rows = tensor.part((first, *(0 for _ in tensor.shape[1:])), (last - first, *tensor.shape[1:]))
                self._kept[key] = widen(reading.read(rows), tensor.dtype).astype(np.float32, copy=False)
            self._kept.move_to_end(key)
            return self._kept[key]


def _same(one: Stored, other: Stored) -> bool:
    return bool(np.array_equal(one.view(f"u{one.itemsize}"), other.view(f"u{other.itemsize}")))


def _beyond_rounding(tuned: Stored, base: Stored, dtype: str) -> bool:
    if dtype not in ARITHMETIC:
        return True
    for first in range(0, tuned.size, _BLOCK_ELEMENTS):
        values, before = (widen(stored[first : first + _BLOCK_ELEMENTS], dtype) for stored in (tuned, base))
        with np.errstate(all="ignore"):
            if not np.all(np.abs(values - before) <= _ROUNDING * np.abs(before)):
                return True
    return False
