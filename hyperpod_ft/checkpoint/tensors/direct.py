"""Direct I/O: reads and writes that bypass the page cache, with a silent fallback to ordinary I/O.

Through the cache, the CPU copies tens of gigabytes once more although they are not read again; they evict everything
else, and writing them back stalls. tmpfs of older kernels and some network file systems refuse direct I/O, when a
file is opened or only at the first transfer.
"""

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from hyperpod_ft.checkpoint.tensors.elements import Stored
from hyperpod_ft.errors import UserError

BLOCK_BYTES = 8 << 20
# For addresses, offsets and lengths: the largest logical block size of disks in use.
ALIGNMENT = 4096
_O_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux only
# Smaller reads are faster through the cache than as whole blocks.
_LEAST_DIRECT_READ = 256 << 10

_local = threading.local()


def buffer(use: str) -> Stored:
    """This thread's buffer for one `use`: BLOCK_BYTES plus two alignments, uint8, page-aligned."""
    buffers: dict[str, Stored] = _local.__dict__.setdefault("buffers", {})
    if use not in buffers:
        buffers[use] = np.frombuffer(mmap.mmap(-1, BLOCK_BYTES + 2 * ALIGNMENT), np.uint8)
    return buffers[use]


class _Descriptor:
    """An open file that uses direct I/O until the file system refuses it."""

    def __init__(self, path: Path, flags: int) -> None:
        self._direct = bool(_O_DIRECT)
        try:
            self.number = os.open(path, flags | os.O_CLOEXEC | _O_DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._direct = False
            self.number = os.open(path, flags | os.O_CLOEXEC, 0o666)

    def transfer(self, operation: Callable[[int], int]) -> int:
        """`operation(number)`, repeated through the cache when it is invalid as direct I/O."""
        while True:
            direct = self._direct  # read before the call: another thread may fall back during it
            try:
                return operation(self.number)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                flags = fcntl.fcntl(self.number, fcntl.F_GETFL)
                fcntl.fcntl(self.number, fcntl.F_SETFL, flags & ~_O_DIRECT)
                self._direct = False


class DirectReader:
    """Reads ranges of a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._direct = _Descriptor(path, os.O_RDONLY)
            self._cached = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}", "restore the file") from error

    def __enter__(self) -> "DirectReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._direct.number)
        os.close(self._cached)

    def read(self, offset: int, out: Stored) -> None:
        """Fill `out`, 1-D and contiguous, with the bytes from `offset` on. Raises UserError at the end of the file."""
        target = out.data.cast("B")
        while len(target) >= _LEAST_DIRECT_READ:
            found = self._read_directly(offset, min(len(target), BLOCK_BYTES))
            target[: found.size] = found.data
            target, offset = target[found.size :], offset + found.size
        while target:
            got = self._read(target, offset, direct=False)
            if got <= 0:
                raise self._ended(offset)
            target, offset = target[got:], offset + got

    def borrow(self, offset: int, size: int) -> Stored:
        """`size` bytes from `offset` on, at most BLOCK_BYTES, without a copy: valid until this thread reads again."""
        if size >= _LEAST_DIRECT_READ:
            found = self._read_directly(offset, size)
            if found.size == size:
                return found
        copied = np.empty(size, np.uint8)
        self.read(offset, copied)
        return copied

    def _read_directly(self, offset: int, size: int) -> Stored:
        """Between 1 and `size` bytes from `offset` on, in this thread's buffer."""
        aligned = buffer("read")
        skipped = offset % ALIGNMENT
        span = -(-(skipped + size) // ALIGNMENT) * ALIGNMENT
        got = self._read(aligned.data[:span], offset - skipped, direct=True) - skipped
        if got <= 0:
            raise self._ended(offset)
        return aligned[skipped : skipped + min(got, size)]

    def _read(self, into: memoryview, offset: int, *, direct: bool) -> int:
        try:
            if direct:
                return self._direct.transfer(lambda number: os.preadv(number, [into], offset))
            return os.preadv(self._cached, [into], offset)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror}", "restore the file") from error

    def _ended(self, offset: int) -> UserError:
        return UserError(f"{self.path}: ended early, at byte {offset}", "it is truncated: restore it")


class DirectWriter:
    """Writes blocks of a new file; thread-safe. The file's mode follows the umask."""

    def __init__(self, path: Path, size: int) -> None:
        """Reserve `size` bytes: blocks can then be written in any order at full speed, and a full disk fails here."""
        self._size = size
        self._descriptor = _Descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        if size and hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._descriptor.number, 0, size)
            except OSError as error:
                # the file system (older Lustre) or the C library's emulation does not support it
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    os.close(self._descriptor.number)
                    raise

    def __enter__(self) -> "DirectWriter":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor.number)

    def write(self, block: Stored, offset: int) -> None:
        """Write `block`, uint8; its address, its length and `offset` are multiples of a page."""
        view = block.data
        while view:
            written = self._descriptor.transfer(partial(_write, view, offset))
            view, offset = view[written:], offset + written

    def finish(self) -> None:
        """Truncate the last block's padding, and flush the file to disk."""
        os.ftruncate(self._descriptor.number, self._size)
        os.fsync(self._descriptor.number)


def _write(view: memoryview, offset: int, number: int) -> int:
    return os.pwrite(number, view, offset)
