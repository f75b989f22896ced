"""Logical tensors: the contents of a checkpoint as names, dtypes, shapes and byte ranges. This module reads no data."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from hyperpod_ft.errors import UserError

# safetensors' name, torch's name, bytes per element, and numpy's code for the stored bits: an integer if numpy lacks
# the dtype.
_DTYPES = (
    ("F64", "float64", 8, "<f8"),
    ("F32", "float32", 4, "<f4"),
    ("F16", "float16", 2, "<f2"),
    ("BF16", "bfloat16", 2, "<u2"),
    ("F8_E4M3", "float8_e4m3fn", 1, "u1"),
    ("F8_E5M2", "float8_e5m2", 1, "u1"),
    ("I64", "int64", 8, "<i8"),
    ("I32", "int32", 4, "<i4"),
    ("I16", "int16", 2, "<i2"),
    ("I8", "int8", 1, "i1"),
    ("U64", "uint64", 8, "<u8"),
    ("U32", "uint32", 4, "<u4"),
    ("U16", "uint16", 2, "<u2"),
    ("U8", "uint8", 1, "u1"),
    ("BOOL", "bool", 1, "?"),
)
DTYPE_BYTES = {name: nbytes for name, _, nbytes, _ in _DTYPES}
DTYPE_OF_TORCH_NAME = {torch_name: name for name, torch_name, _, _ in _DTYPES}
TORCH_NAME_OF_DTYPE = {name: torch_name for name, torch_name, _, _ in _DTYPES}
NUMPY_CODE = {name: code for name, _, _, code in _DTYPES}
FLOATING = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})


@dataclass(frozen=True)
class Piece:
    """A box of a logical tensor and where it is stored: element (i, j) at offset + (i, j)·strides elements."""

    file: Path
    offset: int  # bytes; of the box's first element
    start: tuple[int, ...]  # where the box begins in the logical tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements

    @property
    def extent(self) -> int:
        """Elements from the box's first to its last, gaps included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def alone(self) -> "Piece":
        """The same elements as the only piece of a separate tensor."""
        return replace(self, start=(0,) * len(self.shape))

    def within(self, start: Sequence[int], shape: Sequence[int], itemsize: int) -> "Piece | None":
        """The part inside the box of `shape` at `start`, all in the tensor's coordinates; None if empty.

        `itemsize`: bytes per element.
        """
        lows = tuple(max(one, other) for one, other in zip(self.start, start, strict=True))
        highs = (
            min(one + size, other + length)
            for one, size, other, length in zip(self.start, self.shape, start, shape, strict=True)
        )
        sizes = tuple(high - low for low, high in zip(lows, highs, strict=True))
        if any(size <= 0 for size in sizes):
            return None
        inside = (low - first for low, first in zip(lows, self.start, strict=True))
        skipped = sum(distance * stride for distance, stride in zip(inside, self.strides, strict=True))
        return replace(self, offset=self.offset + skipped * itemsize, start=lows, shape=sizes)


@dataclass(frozen=True)
class LogicalTensor:
    """One whole tensor under its final name, assembled from its pieces.

    `replicas` are copies of parts of it on other ranks, which must be equal.
    """

    name: str
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    replicas: tuple[Piece, ...] = ()

    @property
    def stored(self) -> tuple[Piece, ...]:
        """All stored pieces, replicas included."""
        return (*self.pieces, *self.replicas)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * DTYPE_BYTES[self.dtype]

    def renamed(self, name: str) -> "LogicalTensor":
        return replace(self, name=name)

    def part(self, start: Sequence[int], shape: tuple[int, ...]) -> "LogicalTensor":
        """The box of `shape` at `start` as a separate tensor, without replicas."""
        parts = (piece.within(start, shape, DTYPE_BYTES[self.dtype]) for piece in self.pieces)
        pieces = tuple(
            replace(part, start=tuple(one - first for one, first in zip(part.start, start, strict=True)))
            for part in parts
            if part
        )
        assert sum(math.prod(piece.shape) for piece in pieces) == math.prod(shape), self.name
        return LogicalTensor(self.name, self.dtype, shape, pieces)

    def with_axes(self, axes: Sequence[int]) -> "LogicalTensor":
        """The same elements with these axes, in this order; what is left out has length 1. Without replicas."""

        def taken(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(values[axis] for axis in axes)

        pieces = tuple(
            replace(piece, start=taken(piece.start), shape=taken(piece.shape), strides=taken(piece.strides))
            for piece in self.pieces
        )
        return LogicalTensor(self.name, self.dtype, taken(self.shape), pieces)

    def moved(self, by: Sequence[int]) -> "LogicalTensor":
        """The same elements in a larger tensor, from `by` to its end; what is before them is missing."""

        def added(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(one + other for one, other in zip(values, by, strict=True))

        pieces = tuple(replace(piece, start=added(piece.start)) for piece in self.pieces)
        return LogicalTensor(self.name, self.dtype, added(self.shape), pieces)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def check(tensors: Iterable[LogicalTensor], where: Path) -> None:
    """Raise UserError unless the pieces of every tensor are within their files and cover it exactly once.

    Replicas must be within their files too; they may cover any part, any number of times.
    """
    size_of = cache(_size)
    for tensor in tensors:
        for piece in (*tensor.pieces, *tensor.replicas):
            _check_piece(tensor, piece, size_of, where)
        held = sum(math.prod(piece.shape) for piece in tensor.pieces)
        if held != tensor.elements or _overlap(tensor.pieces):
            raise UserError(
                f"{where}: tensor {tensor.name} is incomplete: its {len(tensor.pieces)} pieces hold {held} elements"
                f" of {tensor.elements} (shape {list(tensor.shape)})",
                "use an earlier checkpoint, or train again",
            )


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise UserError(
            f"{file}: is missing ({error.strerror})", "the checkpoint is incomplete: use an earlier one"
        ) from error


def _check_piece(tensor: LogicalTensor, piece: Piece, size_of: Callable[[Path], int], where: Path) -> None:
    rank = len(tensor.shape)
    if not (len(piece.start) == len(piece.shape) == len(piece.strides) == rank):
        raise UserError(
            f"{where}: tensor {tensor.name}: a piece has a different number of dimensions", "use an earlier checkpoint"
        )
    inside = all(
        start >= 0 and size >= 0 and start + size <= whole
        for start, size, whole in zip(piece.start, piece.shape, tensor.shape, strict=True)
    )
    if not inside or piece.offset < 0 or min(piece.strides, default=0) < 0:
        raise UserError(f"{where}: tensor {tensor.name}: a piece is outside it", "the checkpoint is damaged")
    end = piece.offset + piece.extent * DTYPE_BYTES[tensor.dtype]
    if end > size_of(piece.file):
        raise UserError(
            f"{piece.file}: is truncated: {size_of(piece.file)} bytes, tensor {tensor.name} ends at {end}",
            "the checkpoint is incomplete: use an earlier one",
        )


def _overlap(pieces: tuple[Piece, ...]) -> bool:
    """Whether two pieces share an element. Compares only neighbours along the dimension with the most cuts."""
    boxes = [piece for piece in pieces if 0 not in piece.shape]
    if len(boxes) < 2:
        return False
    axis = max(range(len(boxes[0].start)), key=lambda axis: len({box.start[axis] for box in boxes}), default=None)
    if axis is None:
        return True
    boxes.sort(key=lambda box: box.start[axis])
    for index, left in enumerate(boxes):
        for other in range(index + 1, len(boxes)):
            if boxes[other].start[axis] >= left.start[axis] + left.shape[axis]:
                break
            if _intersect(left, boxes[other]):
                return True
    return False


def _intersect(left: Piece, right: Piece) -> bool:
    return all(
        left.start[axis] < right.start[axis] + right.shape[axis]
        and right.start[axis] < left.start[axis] + left.shape[axis]
        for axis in range(len(left.start))
    )
