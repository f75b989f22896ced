"""Combines the CRC-32 of parts into that of a range, so that a file can be checked while it is read in any order."""

import threading
import zlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from hyperpod_ft.checkpoint.tensors.elements import Stored

_POLYNOMIAL = 0xEDB88320  # of zip and zlib, bits reversed


def combine(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of concatenated parts, each given as (CRC-32, bytes).

    Appending n zero bytes to a message is linear in the CRC over GF(2): the n-th power of a 32 x 32 bit matrix, here a
    product of its powers of two (Mark Adler's crc32_combine in zlib).
    """
    whole = 0
    for crc, length in parts:
        power = 0
        while length >> power:
            if length >> power & 1:
                whole = _times(_ZEROS[power], whole)
            power += 1
        whole ^= crc
    return whole


def _times(matrix: list[int], vector: int) -> int:
    product = 0
    for column in matrix:
        if not vector:
            break
        if vector & 1:
            product ^= column
        vector >>= 1
    return product


def _square(matrix: list[int]) -> list[int]:
    return [_times(matrix, column) for column in matrix]


def _powers() -> list[list[int]]:
    """The matrices that append 1, 2, 4, ... zero bytes."""
    matrix = [_POLYNOMIAL, *(1 << bit for bit in range(31))]  # one zero bit
    for _ in range(3):
        matrix = _square(matrix)
    powers = [matrix]
    while len(powers) < 48:
        powers.append(_square(powers[-1]))
    return powers


_ZEROS = _powers()


class Ledger:
    """Records the CRC-32 of every file range that was read; thread-safe."""

    def __init__(self) -> None:
        self._ranges: dict[Path, list[tuple[int, int, int]]] = defaultdict(list)  # offset, bytes, CRC-32
        self._lock = threading.Lock()

    def note(self, file: Path, offset: int, content: Stored) -> None:
        """Record that `content`, contiguous, was read from byte `offset`."""
        crc = zlib.crc32(content.data)
        with self._lock:
            self._ranges[file].append((offset, content.nbytes, crc))

    def sort(self) -> None:
        """Call this after the last `note` and before `crc32`."""
        for ranges in self._ranges.values():
            ranges.sort()

    def crc32(self, file: Path, offset: int, size: int) -> int | None:
        """The CRC-32 of a range of the file; None unless the recorded reads cover it exactly once."""
        parts = []
        position = offset
        ranges = self._ranges.get(file, [])
        for begin, length, crc in ranges[bisect_left(ranges, (offset,)) :]:
            if position == offset + size or begin != position:
                break
            parts.append((crc, length))
            position += length
        return combine(parts) if position == offset + size else None
