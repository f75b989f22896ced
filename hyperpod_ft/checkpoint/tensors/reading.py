"""Reads any range of a logical tensor's elements, so that no whole tensor must fit in memory."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from hyperpod_ft.checkpoint.tensors.crc32 import Ledger
from hyperpod_ft.checkpoint.tensors.direct import BLOCK_BYTES, DirectReader
from hyperpod_ft.checkpoint.tensors.elements import STORED, Floats, Stored, nonfinite, widen
from hyperpod_ft.checkpoint.tensors.layout import LogicalTensor, Piece, contiguous_strides
from hyperpod_ft.errors import UserError

# A checkpoint may have thousands of files; at most this many stay open between reads.
_IDLE_READERS = 64


class Reader:
    """Reads logical tensors; thread-safe. The `ledger`, if given, records what `fill` reads."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._ledger = ledger
        self._idle: list[DirectReader] = []  # least recently used first
        self._lock = threading.Lock()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        while self._idle:
            self._idle.pop().close()

    def fill(self, tensor: LogicalTensor, begin: int, end: int, out: Stored) -> None:
        """Read elements [begin, end) in row-major order into `out`, 1-D, of the stored dtype (`elements.STORED`).

        Raises UserError when a file ends early or cannot be read.
        """
        row = int(np.prod(tensor.shape[1:], dtype=np.int64))
        if all(_holds_whole_rows(piece, tensor) for piece in tensor.pieces):
            for piece in tensor.pieces:
                first = piece.start[0] * row if tensor.shape else 0
                low, high = max(begin, first), min(end, first + int(np.prod(piece.shape, dtype=np.int64)))
                if low < high:
                    offset = piece.offset + (low - first) * out.itemsize
                    self._read(piece.file, offset, out[low - begin : high - begin])
                    if self._ledger:
                        self._ledger.note(piece.file, offset, out[low - begin : high - begin])
            return
        first_row, last_row = begin // row, -(-end // row)
        aligned = (first_row * row, last_row * row) == (begin, end)
        rows = out if aligned else np.empty((last_row - first_row) * row, out.dtype)
        # a row that spans two blocks is recorded with the first
        begun = -(-begin // row)
        self._gather(tensor, first_row, last_row, rows.reshape(last_row - first_row, *tensor.shape[1:]), begun)
        if not aligned:
            out[:] = rows[begin - first_row * row : end - first_row * row]

    def borrow(self, tensor: LogicalTensor, begin: int, end: int) -> Stored:
        """Elements [begin, end), 1-D, at most BLOCK_BYTES: without a copy if they are contiguous; then read-only,
        and valid until this thread reads again.
        """
        dtype = STORED[tensor.dtype]
        if len(tensor.pieces) == 1 and not self._ledger and _holds_whole_rows(piece := tensor.pieces[0], tensor):
            offset = piece.offset + begin * dtype.itemsize
            with self._source(piece.file) as source:
                found = source.borrow(offset, (end - begin) * dtype.itemsize)
            # computing with unaligned elements is slow
            return found.view(dtype) if found.ctypes.data % dtype.itemsize == 0 else found.copy().view(dtype)
        copied = np.empty(end - begin, dtype)
        self.fill(tensor, begin, end, copied)
        return copied

    def stored(self, tensor: LogicalTensor) -> Stored:
        """The whole tensor in its stored form, in its shape."""
        whole = np.empty(tensor.elements, STORED[tensor.dtype])
        self.fill(tensor, 0, tensor.elements, whole)
        return whole.reshape(tensor.shape)

    def floats(self, tensor: LogicalTensor) -> Floats:
        """The whole tensor's values, in its shape: float32, or float64 for F64."""
        return widen(self.stored(tensor), tensor.dtype)

    def blocks(self, tensor: LogicalTensor, block_bytes: int = BLOCK_BYTES) -> Iterator[Stored]:
        """All elements in order, 1-D, `block_bytes` at a time; each block is overwritten by the next."""
        dtype = STORED[tensor.dtype]
        buffer = np.empty(min(tensor.elements, max(1, block_bytes // dtype.itemsize)), dtype)
        for begin in range(0, tensor.elements, max(1, buffer.size)):
            end = min(begin + buffer.size, tensor.elements)
            self.fill(tensor, begin, end, buffer[: end - begin])
            yield buffer[: end - begin]

    def box(self, piece: Piece, dtype: str) -> Stored:
        """The elements of one piece, in its shape."""
        alone = LogicalTensor("", dtype, piece.shape, (piece.alone,))
        return self.stored(alone)

    def _gather(self, tensor: LogicalTensor, first: int, last: int, rows: Stored, noted: int) -> None:
        """Rows [first, last) of a tensor with pieces other than whole, contiguous rows; records from row `noted` on."""
        parts = [cut for piece in tensor.pieces if (cut := _rows_of(piece, first, last, rows.itemsize)) is not None]
        for together in _shared_extents(parts, rows.itemsize):
            low = together[0].offset
            high = max(part.offset + part.extent * rows.itemsize for part in together)
            content = np.empty(high - low, np.uint8)
            self._read(together[0].file, low, content)
            if self._ledger:
                skipped = max(0, noted - together[0].start[0]) * together[0].strides[0] * rows.itemsize
                self._ledger.note(together[0].file, low + skipped, content[skipped:])
            for part in together:
                strides = tuple(stride * rows.itemsize for stride in part.strides)
                box: Stored = np.ndarray(part.shape, rows.dtype, content.data, part.offset - low, strides)
                begins = (part.start[0] - first, *part.start[1:])
                rows[tuple(slice(begin, begin + size) for begin, size in zip(begins, part.shape, strict=True))] = box

    def _read(self, file: Path, offset: int, out: Stored) -> None:
        with self._source(file) as source:
            source.read(offset, out)

    @contextmanager
    def _source(self, file: Path) -> Iterator[DirectReader]:
        source = self._take(file) or DirectReader(file)
        try:
            yield source
        finally:
            with self._lock:
                self._idle.append(source)
                spare = self._idle.pop(0) if len(self._idle) > _IDLE_READERS else None
            if spare:
                spare.close()

    def _take(self, file: Path) -> DirectReader | None:
        """Take an idle reader of the file off the list, so that no other thread closes it while it is in use."""
        with self._lock:
            for index in range(len(self._idle) - 1, -1, -1):
                if self._idle[index].path == file:
                    return self._idle.pop(index)
        return None


def refuse_nonfinite(stored: Stored, dtype: str, name: str, where: str, remedy: str) -> None:
    """Raise UserError when `stored` holds a NaN or an infinity."""
    if kind := nonfinite(stored, dtype):
        raise UserError(f"{where}: tensor {name} holds {kind}", remedy)


def _holds_whole_rows(piece: Piece, tensor: LogicalTensor) -> bool:
    return piece.shape[1:] == tensor.shape[1:] and piece.strides == contiguous_strides(piece.shape)


def _rows_of(piece: Piece, first: int, last: int, itemsize: int) -> Piece | None:
    """The part of `piece` in rows [first, last) of its tensor."""
    low, high = max(first, piece.start[0]), min(last, piece.start[0] + piece.shape[0])
    if low >= high or 0 in piece.shape:
        return None
    offset = piece.offset + (low - piece.start[0]) * piece.strides[0] * itemsize
    return Piece(piece.file, offset, (low, *piece.start[1:]), (high - low, *piece.shape[1:]), piece.strides)


def _shared_extents(parts: Sequence[Piece], itemsize: int) -> Iterator[list[Piece]]:
    """Groups of pieces whose bytes overlap in one file, as columns of one matrix do: each group is one read."""
    group: list[Piece] = []
    end = 0
    for part in sorted(parts, key=lambda part: (str(part.file), part.offset)):
        if group and (part.file != group[0].file or part.offset >= end):
            yield group
            group, end = [], 0
        group.append(part)
        end = max(end, part.offset + part.extent * itemsize)
    if group:
        yield group
