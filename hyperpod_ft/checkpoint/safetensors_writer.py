"""The writer: streams blocks of rows into safetensors shards, header first, in bounded memory.

It writes into a directory that `publish.new_directory` hands out, which syncs it and gives it its name when all is
there. Files get their mode from the umask; safetensors' own writer leaves 0600, which shuts others out of a shared
volume.
"""

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hyperpod_ft import publish
from hyperpod_ft.checkpoint.layout import DTYPE_BYTES, LogicalTensor
from hyperpod_ft.checkpoint.progress import Progress
from hyperpod_ft.checkpoint.reading import TORCH_DTYPE
from hyperpod_ft.checkpoint.safetensors_file import INDEX, SINGLE
from hyperpod_ft.errors import UserError

# What a tensor's entry in the header takes at most, besides its name.
_ENTRY_BYTES = 200
_HEADER_ALIGNMENT = 64


@dataclass(frozen=True)
class Outgoing:
    """A tensor to write. `blocks` makes it: rows in order, in `dtype`, together `shape`; called once."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        return LogicalTensor(self.name, self.dtype, self.shape, ()).nbytes


@dataclass(frozen=True)
class Written:
    """What the writer left: file names in order, and the tensors' bytes."""

    files: tuple[str, ...]
    tensors: int
    nbytes: int


def write_model(directory: Path, tensors: Sequence[Outgoing], max_shard_bytes: int, progress: Progress) -> Written:
    """Write `model.safetensors`, or shards of at most `max_shard_bytes` each and their index.

    A tensor that is larger on its own gets a shard of its own. Raises UserError when the disk is full.
    """
    shards = list(_shards(tensors, max_shard_bytes))
    if len(shards) == 1:
        names = [SINGLE]
    else:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_file(directory / name, shard, progress)
    total = sum(tensor.nbytes for tensor in tensors)
    if len(shards) > 1:
        placed = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
        publish.write_json(directory / INDEX, index)
    return Written(tuple(names), len(tensors), total)


def write_file(file: Path, tensors: Sequence[Outgoing], progress: Progress) -> None:
    """Write one safetensors file. Raises UserError when the disk is full."""
    # widest dtype first, as safetensors itself does, so that every tensor starts at a multiple of its element size
    ordered = sorted(tensors, key=lambda tensor: -DTYPE_BYTES[tensor.dtype])
    try:
        with file.open("wb", buffering=0) as stream:
            _write_all(stream.fileno(), _header(ordered))
            for tensor in ordered:
                written = 0
                for block in tensor.blocks():
                    assert block.dtype == TORCH_DTYPE[tensor.dtype], (tensor.name, block.dtype)
                    content = block.contiguous().reshape(-1).view(torch.uint8).numpy().data
                    _write_all(stream.fileno(), content)
                    written += len(content)
                    progress.add(len(content))
                assert written == tensor.nbytes, (tensor.name, written, tensor.nbytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"{file.parent}: {error.strerror}", "free space on the volume and run the stage again"
            ) from (error)
        raise


def _shards(tensors: Sequence[Outgoing], max_bytes: int) -> Iterator[list[Outgoing]]:
    shard: list[Outgoing] = []
    size = 0
    for tensor in tensors:
        cost = tensor.nbytes + len(tensor.name.encode()) + _ENTRY_BYTES
        if shard and size + cost > max_bytes:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += cost
    yield shard


def _header(tensors: Sequence[Outgoing]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    # the format allows trailing spaces, so that the data starts aligned
    text += b" " * (-(8 + len(text)) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_all(descriptor: int, content: bytes | memoryview) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
