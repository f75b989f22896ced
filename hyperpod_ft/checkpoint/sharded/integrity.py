"""Whether the bytes of a sharded checkpoint are those that were written.

torch.save records a CRC-32 of every record, which torch.load does not check: a flipped byte becomes a wrong weight.
"""

import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

from hyperpod_ft.checkpoint.formats import torch_file
from hyperpod_ft.checkpoint.formats.torch_file import Archive, ZipRecord
from hyperpod_ft.checkpoint.tensors import direct
from hyperpod_ft.checkpoint.tensors.blocks import THREADS
from hyperpod_ft.checkpoint.tensors.direct import BLOCK_BYTES
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import ByteProgress


def refuse_damage(tensors: Iterable[LogicalTensor], archives: Iterable[Archive]) -> None:
    """Raise UserError when a record that holds part of a tensor does not have the CRC-32 that was saved with it.

    `archives`: where the tensors are stored.
    """
    needed = list(_needed(tensors, archives))
    with (
        ByteProgress("check", sum(record.size for _, record in needed)) as progress,
        ThreadPoolExecutor(THREADS, "integrity") as pool,
    ):
        checks = [pool.submit(_check, file, record, progress) for file, record in needed]
        try:
            for check in checks:
                check.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _needed(tensors: Iterable[LogicalTensor], archives: Iterable[Archive]) -> Iterator[tuple[Path, ZipRecord]]:
    """The records of the archives that hold parts of tensors."""
    wanted = sorted({(str(piece.file), piece.offset) for tensor in tensors for piece in tensor.stored})
    offsets = {file: [offset for _, offset in group] for file, group in groupby(wanted, key=lambda place: place[0])}
    for archive in archives:
        inside = offsets.get(str(archive.file), [])
        for record in torch_file.records(archive):
            index = bisect_left(inside, record.offset)
            if index < len(inside) and inside[index] < record.offset + record.size:
                yield archive.file, record


def _check(file: Path, record: ZipRecord, progress: ByteProgress) -> None:
    found = 0
    end = record.offset + record.size
    for begin in range(record.offset, end, BLOCK_BYTES):
        block = direct.buffer("check")[: min(BLOCK_BYTES, end - begin)]
        direct.read(file, begin, block)
        found = zlib.crc32(block.data, found)
        progress.add(block.size)
    if found != record.crc32:
        raise UserError(
            f"{file}: is damaged: bytes {record.offset} to {end} do not match the checksum that was saved with them",
            "restore the file, or use an earlier checkpoint",
        )
