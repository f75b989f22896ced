"""The writer: streams tensors into safetensors shards, header first, from several threads in bounded memory.

A shard is cut into blocks of 8 MiB of the file, which threads fill and write in any order; a block may end one tensor
and begin the next. Writes bypass the page cache if the file system allows it: buffered writing of tens of
gigabytes copies every byte once more and stalls whenever the kernel writes back. File modes follow the umask;
safetensors' own writer leaves 0600, which excludes other users of a shared volume.

A shard gets its name when it is complete and on disk, and is noted then (`resumable`), so that an attempt after a kill
resumes with the next one.
"""

import json
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType

import numpy as np

from hyperpod_ft import publish
from hyperpod_ft.checkpoint.formats import resumable
from hyperpod_ft.checkpoint.formats.resumable import NoSpaceError
from hyperpod_ft.checkpoint.formats.safetensors_file import INDEX, SINGLE
from hyperpod_ft.checkpoint.tensors import direct, reading
from hyperpod_ft.checkpoint.tensors.blocks import THREADS, Digest, for_each
from hyperpod_ft.checkpoint.tensors.direct import ALIGNMENT, BLOCK_BYTES, DirectWriter
from hyperpod_ft.checkpoint.tensors.elements import STORED, Stored
from hyperpod_ft.checkpoint.tensors.logical_tensor import DTYPE_BYTES, LogicalTensor
from hyperpod_ft.progress import ByteProgress

MAX_SHARD_BYTES = 5_000_000_000  # of a file of weights, unless another size is asked for
# The most that a tensor's entry in the header takes, without its name.
_ENTRY_BYTES = 200

Fill = Callable[[int, int, Stored], None]


@dataclass(frozen=True)
class Outgoing:
    """A tensor to write.

    `fill(begin, end, out)` puts its elements [begin, end), row-major, into `out`, 1-D of the stored dtype
    (`elements.STORED`). It is called from several threads, in any order, once for each element.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    fill: Fill

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def copied(tensor: LogicalTensor) -> Outgoing:
    """The tensor as it is stored."""
    return Outgoing(
        tensor.name, tensor.dtype, tensor.shape, lambda begin, end, out: reading.fill(tensor, begin, end, out)
    )


@dataclass(frozen=True)
class WrittenFiles:
    """The files written, in order, and the number and bytes of their tensors."""

    files: tuple[str, ...]
    tensors: int
    nbytes: int


def write_model(
    directory: Path,
    tensors: Sequence[Outgoing],
    max_shard_bytes: int,
    progress: ByteProgress,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> WrittenFiles:
    """Write `model.safetensors`, or shards of at most `max_shard_bytes` each and their index; `metadata`: in each file.

    `directory` comes from `resumable_directory`. A tensor larger than `max_shard_bytes` gets a separate shard.
    Raises NoSpaceError when the volume has too little space.
    """
    shards = list(_shards(tensors, max_shard_bytes))
    if len(shards) == 1:
        names = [SINGLE]
    else:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    written = write_files(directory, dict(zip(names, shards, strict=True)), progress, metadata)
    if len(shards) > 1:
        placed = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": written.nbytes}, "weight_map": dict(sorted(placed.items()))}
        publish.write_json(directory / INDEX, index)
    return written


def write_files(
    directory: Path,
    files: Mapping[str, Sequence[Outgoing]],
    progress: ByteProgress,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> WrittenFiles:
    """Write safetensors files, by name, into a `resumable_directory`. Raises as `write_model` does."""
    before = resumable.finished(directory)
    left = {name: tensors for name, tensors in files.items() if name not in before}
    for name, tensors in files.items():
        if name not in left:
            progress.add(sum(tensor.nbytes for tensor in tensors))
    _check_space(directory, sum(tensor.nbytes for tensors in left.values() for tensor in tensors))
    with ThreadPoolExecutor(THREADS, "writer") as pool:
        for name, tensors in left.items():
            resumable.note(directory, name, _write_file(directory / name, tensors, pool, progress, metadata))
    count = sum(len(tensors) for tensors in files.values())
    nbytes = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
    return WrittenFiles(tuple(files), count, nbytes)


def _check_space(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise NoSpaceError(
            f"{directory.parent}: {needed / 1e9:.2f} GB to write, {free / 1e9:.2f} GB free",
            "free space on the volume and run the command again",
        )


def _shards(tensors: Sequence[Outgoing], max_bytes: int) -> Iterator[list[Outgoing]]:
    shard: list[Outgoing] = []
    size = ALIGNMENT
    for tensor in tensors:
        cost = tensor.nbytes + len(tensor.name.encode()) + _ENTRY_BYTES
        if shard and size + cost > max_bytes:
            yield shard
            shard, size = [], ALIGNMENT
        shard.append(tensor)
        size += cost
    yield shard


def _write_file(
    final: Path,
    tensors: Sequence[Outgoing],
    pool: ThreadPoolExecutor,
    progress: ByteProgress,
    metadata: Mapping[str, str],
) -> str:
    """Write one file under another name, sync it, rename it. Returns its XXH3 (128 bits) as hex."""
    # widest dtype first, as safetensors itself does, so that every tensor starts at a multiple of its element size
    ordered = sorted(tensors, key=lambda tensor: -DTYPE_BYTES[tensor.dtype])
    content = _Content(_header(ordered, metadata), ordered)
    partial = publish.partial_of(final)
    digest = Digest()
    with DirectWriter(partial) as file:

        def write_block(begin: int) -> None:
            with digest.turn():
                end = min(begin + BLOCK_BYTES, content.size)
                whole = direct.buffer("write")[:BLOCK_BYTES]
                block, padding = whole[: end - begin], whole[end - begin :]
                content.fill(begin, end, block)
                padding[:] = 0
                file.write(whole[: block.size + -block.size % ALIGNMENT], begin)
                digest.update(begin, block)
            progress.add(end - begin)

        for_each(pool, content.blocks(), write_block)
        file.finish(content.size)
    partial.rename(final)
    publish.fsync(final.parent)
    return digest.hexdigest()


class _Content:
    """The bytes of a safetensors file: any range of them."""

    def __init__(self, header: bytes, tensors: Sequence[Outgoing]) -> None:
        self._header = np.frombuffer(header, np.uint8)
        self._tensors = tensors
        self._begins = [len(header)]
        for tensor in tensors:
            self._begins.append(self._begins[-1] + tensor.nbytes)
        self.size = self._begins[-1]

    def blocks(self) -> range:
        """Where each block begins."""
        return range(0, self.size, BLOCK_BYTES)

    def fill(self, begin: int, end: int, out: Stored) -> None:
        """Bytes [begin, end) into `out`, uint8."""
        header = self._header[begin:end]
        out[: len(header)] = header
        for index in range(max(0, bisect_right(self._begins, begin) - 1), len(self._tensors)):
            tensor, first, last = self._tensors[index], self._begins[index], self._begins[index + 1]
            low, high = max(begin, first), min(end, last)
            if first >= end:
                break
            if low < high:
                width = DTYPE_BYTES[tensor.dtype]
                target = out[low - begin : high - begin].view(STORED[tensor.dtype])
                tensor.fill((low - first) // width, (high - first) // width, target)


def _header(tensors: Sequence[Outgoing], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    # the format allows trailing spaces: the data starts on a page, ready for direct reading and for mapping
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
