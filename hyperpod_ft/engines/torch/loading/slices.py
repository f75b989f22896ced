"""Copies a slice of a stored tensor into memory, in blocks of bounded size: no whole tensor is ever read."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from hyperpod_ft.checkpoint.tensors.logical_tensor import DTYPE_BYTES, TORCH_NAME_OF_DTYPE, LogicalTensor, Piece
from hyperpod_ft.errors import UserError

# Large enough that system calls cost nothing, small enough for the core's cache and for 64 ranks on a node.
BLOCK_BYTES = 2 << 20


class SliceReader:
    """Reads slices of logical tensors through one buffer of `block_bytes`; not thread-safe.

    Files are read through the page cache: ranks of one node that need the same bytes, all of them when the weights
    are replicated, fetch them from the shared volume once.
    """

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._buffer = torch.empty(block_bytes, dtype=torch.uint8)
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> "SliceReader":
        return self

    def __exit__(self, *_: object) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def copy(self, tensor: LogicalTensor, start: Sequence[int], out: torch.Tensor) -> None:
        """Fill `out` with the part of `tensor` that begins at element `start` and has the shape of `out`.

        `out` has any dtype, device and strides; values are converted as `Tensor.to` does. Raises UserError when a file
        cannot be read, ends early, or holds a replica that differs.
        """
        for target, block in self._blocks(tensor, tensor.pieces, start, out):
            target.copy_(block)
        for target, block in self._blocks(tensor, tensor.replicas, start, out):
            if not torch.equal(target, block.to(target.device, target.dtype)):
                raise UserError(
                    f"{tensor.replicas[0].file}: tensor {tensor.name} is stored twice, with different values, but"
                    " config.json ties the two",
                    "set tie_word_embeddings in config.json to false, or remove one of the two tensors",
                )

    def _blocks(
        self, tensor: LogicalTensor, pieces: Sequence[Piece], start: Sequence[int], out: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of `out` with their stored values, which are valid until the next part."""
        itemsize = DTYPE_BYTES[tensor.dtype]
        dtype = getattr(torch, TORCH_NAME_OF_DTYPE[tensor.dtype])
        for piece in pieces:
            box = piece.within(start, out.shape, itemsize)
            for block in _cut(box, len(self._buffer) // itemsize, itemsize) if box else ():
                content = self._buffer[: block.extent * itemsize]
                self._read(block.file, block.offset, content)
                begins = [begin - first for begin, first in zip(block.start, start, strict=True)]
                places = tuple(slice(b, b + size) for b, size in zip(begins, block.shape, strict=True))
                yield out[places], content.view(dtype).as_strided(block.shape, block.strides)

    def _read(self, file: Path, offset: int, content: torch.Tensor) -> None:
        target = content.numpy().data
        try:
            descriptor = self._descriptor(file)
            while target:
                got = os.preadv(descriptor, [target], offset)
                if not got:
                    raise UserError(f"{file}: ended early, at byte {offset}", "it is truncated: restore it")
                target, offset = target[got:], offset + got
        except OSError as error:
            raise UserError(f"{file}: cannot be read: {error.strerror}", "restore the file") from error

    def _descriptor(self, file: Path) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            if hasattr(os, "posix_fadvise"):
                # twice the read-ahead: from a disk, reading was two to four times as fast
                os.posix_fadvise(self._descriptors[file], 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self._descriptors[file]


def _cut(box: Piece, elements: int, itemsize: int, axis: int = 0) -> Iterator[Piece]:
    """Parts of a box that are at most `elements` long in the file, gaps included: runs of rows where rows are short.

    Columns of a matrix are read with the columns between them, which other ranks of the node need.
    """
    if box.extent <= elements:
        yield box
        return
    step = max(1, elements // box.strides[axis])
    for first in range(0, box.shape[axis], step):
        start = (*box.start[:axis], box.start[axis] + first, *box.start[axis + 1 :])
        shape = (*box.shape[:axis], step, *box.shape[axis + 1 :])
        part = box.within(start, shape, itemsize)
        assert part is not None
        yield from _cut(part, elements, itemsize, axis + 1)
