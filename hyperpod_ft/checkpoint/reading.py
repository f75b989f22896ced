"""From descriptions to data: blocks of rows of logical tensors, so that no tensor need be in memory whole."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch

from hyperpod_ft.checkpoint.layout import DTYPE_BYTES, DTYPE_OF_TORCH_NAME, LogicalTensor, Piece, contiguous_strides
from hyperpod_ft.errors import UserError

TORCH_DTYPE: dict[str, torch.dtype] = {dtype: getattr(torch, name) for name, dtype in DTYPE_OF_TORCH_NAME.items()}
BLOCK_BYTES = 16 << 20


class Reader:
    """Reads logical tensors; keeps each file open until it is closed."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> "Reader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        self._descriptors.clear()

    def blocks(self, tensor: LogicalTensor, block_bytes: int = BLOCK_BYTES) -> Iterator[torch.Tensor]:
        """The tensor's rows in order, as many at a time as make `block_bytes` (at least one).

        Each block has shape (rows, *tensor.shape[1:]), a tensor without dimensions is one block. Raises UserError
        when a file ends early.
        """
        if not tensor.shape:
            yield self.rows(tensor, 0, 1)
            return
        for first, last in row_ranges(tensor.shape, DTYPE_BYTES[tensor.dtype], block_bytes):
            yield self.rows(tensor, first, last)

    def tensor(self, tensor: LogicalTensor) -> torch.Tensor:
        """The whole tensor."""
        return self.rows(tensor, 0, tensor.shape[0] if tensor.shape else 1)

    def rows(self, tensor: LogicalTensor, first: int, last: int) -> torch.Tensor:
        """Rows [first, last), contiguous, in the tensor's dtype. Raises UserError when a file ends early."""
        dtype = TORCH_DTYPE[tensor.dtype]
        if not tensor.shape:
            return self._box(tensor.pieces[0], dtype, ())
        shape = (last - first, *tensor.shape[1:])
        parts = [piece for piece in tensor.pieces if piece.start[0] < last and first < piece.start[0] + piece.shape[0]]
        if len(parts) == 1 and parts[0].shape[1:] == tensor.shape[1:]:
            return self._rows_of(parts[0], dtype, first, last).contiguous()
        whole = torch.empty(shape, dtype=dtype)
        for part in parts:
            begin, end = max(first, part.start[0]), min(last, part.start[0] + part.shape[0])
            across = zip(part.start[1:], part.shape[1:], strict=True)
            target = (slice(begin - first, end - first), *(slice(start, start + size) for start, size in across))
            whole[target] = self._rows_of(part, dtype, begin, end)
        return whole

    def _rows_of(self, piece: Piece, dtype: torch.dtype, first: int, last: int) -> torch.Tensor:
        """Rows of the logical tensor that `piece` holds all of."""
        skipped = (first - piece.start[0]) * piece.strides[0] * dtype.itemsize
        shape = (last - first, *piece.shape[1:])
        return self._box(Piece(piece.file, piece.offset + skipped, piece.start, shape, piece.strides), dtype, shape)

    def _box(self, piece: Piece, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        extent = piece.extent
        if extent == 0:
            return torch.empty(shape, dtype=dtype)
        content = torch.frombuffer(self._read(piece.file, piece.offset, extent * dtype.itemsize), dtype=dtype)
        if piece.strides == contiguous_strides(shape):
            return content.reshape(shape)
        return content.as_strided(shape, piece.strides)

    def _read(self, file: Path, offset: int, length: int) -> bytearray:
        content = bytearray(length)
        view = memoryview(content)
        while view:
            got = os.preadv(self._descriptor(file), [view], offset)
            if got == 0:
                raise UserError(f"{file}: ended early, at byte {offset}", "it is truncated")
            view, offset = view[got:], offset + got
        return content

    def _descriptor(self, file: Path) -> int:
        if file not in self._descriptors:
            try:
                descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise UserError(f"{file}: cannot be read: {error.strerror}", "restore the file") from error
            self._open.callback(os.close, descriptor)
            self._descriptors[file] = descriptor
        return self._descriptors[file]


def row_ranges(shape: tuple[int, ...], itemsize: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """[first, last) of each block of rows that makes at most `block_bytes`, but at least one row."""
    row = itemsize
    for size in shape[1:]:
        row *= size
    step = max(1, block_bytes // max(1, row))
    for first in range(0, shape[0], step):
        yield first, min(first + step, shape[0])


def refuse_nonfinite(block: torch.Tensor, name: str, where: str, remedy: str) -> torch.Tensor:
    """The block itself. Raises UserError when it holds a NaN or an infinity."""
    if not block.dtype.is_floating_point:
        return block
    # torch has no isfinite for the 8-bit formats
    probe = block.float() if block.dtype.itemsize == 1 else block
    if not bool(torch.isfinite(probe).all()):
        kind = "NaN" if bool(torch.isnan(probe).any()) else "Inf"
        raise UserError(f"{where}: tensor {name} holds {kind}", remedy)
    return block
