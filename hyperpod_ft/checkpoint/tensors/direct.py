"""Direct I/O: reads and writes that bypass the page cache, with a silent fallback to ordinary I/O.

It makes a merge of 3.2 GB take 0.37 times as long, with 0.29 times the CPU time of ordinary I/O (2 virtual cores, cold
cache): tens of gigabytes that are used once do not fill the cache, and need not be copied out of it. tmpfs of older
kernels and some network file systems refuse direct I/O, when a file is opened or only at the first transfer.
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
_MIN_DIRECT_READ = 256 << 10

_local = threading.local()


def buffer(use: str, nbytes: int = BLOCK_BYTES + 2 * ALIGNMENT) -> Stored:
    """This thread's buffer for one `use`: at least `nbytes`, uint8, page-aligned; its next call may overwrite it."""
    buffers: dict[str, Stored] = _local.__dict__.setdefault("buffers", {})
    if use not in buffers or buffers[use].size < nbytes:
        buffers[use] = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    return buffers[use]


class _File:
    """An open file; with `direct`, it uses direct I/O until the file system refuses it."""

    def __init__(self, path: Path, flags: int, *, direct: bool = True) -> None:
        self.direct = direct and bool(_O_DIRECT)
        try:
            self.number = os.open(path, flags | os.O_CLOEXEC | (_O_DIRECT if self.direct else 0), 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct = False
            self.number = os.open(path, flags | os.O_CLOEXEC, 0o666)

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.number)

    def transfer(self, operation: Callable[[int], int]) -> int:
        """`operation(number)`, repeated through the cache when it is invalid as direct I/O."""
        while True:
            direct = self.direct  # read before the call: another thread may fall back during it
            try:
                return operation(self.number)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                flags = fcntl.fcntl(self.number, fcntl.F_GETFL)
                fcntl.fcntl(self.number, fcntl.F_SETFL, flags & ~_O_DIRECT)
                self.direct = False


def read(path: Path, offset: int, out: Stored) -> None:
    """Fill `out`, contiguous, with the bytes from `offset` on. Thread-safe.

    Raises UserError when the file cannot be opened or read, or ends before `out` is full.
    """
    target = out.reshape(-1).data.cast("B")
    try:
        with _File(path, os.O_RDONLY, direct=len(target) >= _MIN_DIRECT_READ) as file:
            while target:
                got = _read_pages(file, target, offset) if file.direct else 0
                # an unaligned read makes `transfer` fall back to ordinary I/O
                got = got or file.transfer(partial(_read, target, offset))
                if not got:
                    raise UserError(f"{path}: is truncated: it ends at byte {offset}", "restore the file")
                target, offset = target[got:], offset + got
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}", "restore the file") from error


def _read_pages(file: _File, target: memoryview, offset: int) -> int:
    """Read whole pages, and copy what `target` needs of them. Returns how much that is."""
    skipped = offset % ALIGNMENT
    size = min(len(target), BLOCK_BYTES)
    pages = buffer("read").data[: -(-(skipped + size) // ALIGNMENT) * ALIGNMENT]
    found = pages[skipped : min(file.transfer(partial(_read, pages, offset - skipped)), skipped + size)]
    target[: len(found)] = found
    return len(found)


class DirectWriter:
    """Writes blocks of a new file; thread-safe. The file's mode follows the umask."""

    def __init__(self, path: Path) -> None:
        self._file = _File(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def __enter__(self) -> "DirectWriter":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file.number)

    def write(self, block: Stored, offset: int) -> None:
        """Write `block`, uint8; its address, its length and `offset` are multiples of a page."""
        view = block.data
        while view:
            written = self._file.transfer(partial(_write, view, offset))
            view, offset = view[written:], offset + written

    def finish(self, size: int) -> None:
        """Truncate the last block's padding, so that the file has `size` bytes, and flush it to disk."""
        os.ftruncate(self._file.number, size)
        os.fsync(self._file.number)


def _read(into: memoryview, offset: int, number: int) -> int:
    return os.preadv(number, [into], offset)


def _write(view: memoryview, offset: int, number: int) -> int:
    return os.pwrite(number, view, offset)
