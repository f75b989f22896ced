"""Processes a file's blocks with threads in any order, in bounded memory, and computes their digest in file order.

One thread alone takes 1.44 times as long to verify 3.2 GB on 2 cores: it cannot read while it computes.
"""

import contextlib
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path

import xxhash

from hyperpod_ft.checkpoint.tensors import direct
from hyperpod_ft.checkpoint.tensors.elements import STORED, Stored
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.processes import usable_cpus
from hyperpod_ft.progress import ByteProgress

# More threads than CPUs of this job: some wait for the disk while others compute.
THREADS = min(8, 2 + usable_cpus())


def for_each(pool: ThreadPoolExecutor, begins: Iterable[int], work: Callable[[int], None]) -> None:
    """Call `work(begin)` for all, started in this order. If one fails, those not started are skipped. Its error is
    raised after the others have ended, when no thread uses the file.
    """
    futures: list[Future[None]] = []
    try:
        futures.extend(pool.submit(work, begin) for begin in begins)
        wait(futures, return_when=FIRST_EXCEPTION)
    finally:
        # in reverse: a block that waits for its turn needs the block before it
        for future in reversed(futures):
            future.cancel()
        wait(futures)
    for future in futures:
        future.result()


class Digest:
    """XXH3 (128 bits) over blocks that threads finish in any order; they must be started in order."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self._position = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Encloses the work on a block: if it fails, the blocks that wait for it fail with the same error."""
        try:
            yield
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            raise

    def update(self, begin: int, block: Stored) -> None:
        """Add the bytes at position `begin`; waits until all bytes before it are added."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._position == begin)
            if self._error is not None:
                raise self._error
        self._hash.update(block.data)
        with self._changed:
            self._position += block.size
            self._changed.notify_all()

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


# Half of the largest transfer: each thread holds up to three copies of a block.
_BLOCK_BYTES = direct.BLOCK_BYTES // 2
# An element may extend this far into the next block: other programs may write unaligned tensors.
_OVERLAP = 7

# `inspect(tensor, first, stored)`: elements from index `first` on, row-major, 1-D, of the stored dtype, valid only
# during the call. Called from several threads, in any order; each element is passed once.
Inspect = Callable[[LogicalTensor, int, Stored], None]


class Scanner:
    """Threads that read whole files once, one file after another, for their digests and to inspect elements."""

    def __init__(self, progress: ByteProgress) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "scanner")
        self._progress = progress

    def __enter__(self) -> "Scanner":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def scan(self, file: Path, tensors: Sequence[LogicalTensor] = (), inspect: Inspect | None = None) -> str:
        """Pass every element of `tensors`, which `file` holds in this order, to `inspect`.

        Returns the file's XXH3 (128 bits) as hex. Raises UserError when it cannot be read to its end.
        """
        begins = [tensor.pieces[0].offset for tensor in tensors]
        digest = Digest()
        size = file.stat().st_size

        def scan_block(begin: int) -> None:
            with digest.turn():
                end = min(begin + _BLOCK_BYTES, size)
                block = direct.buffer("scan")[: min(end + _OVERLAP, size) - begin]
                direct.read(file, begin, block)
                if inspect:
                    for tensor, first, stored in _elements(tensors, begins, begin, end, block):
                        inspect(tensor, first, stored)
                digest.update(begin, block[: end - begin])
            self._progress.add(end - begin)

        for_each(self._pool, range(0, size, _BLOCK_BYTES), scan_block)
        return digest.hexdigest()


def _elements(
    tensors: Sequence[LogicalTensor], begins: Sequence[int], begin: int, end: int, block: Stored
) -> Iterator[tuple[LogicalTensor, int, Stored]]:
    """The elements that begin in bytes [begin, end) of the file; `block` holds these bytes and some after them."""
    for index in range(max(0, bisect_right(begins, begin) - 1), len(tensors)):
        tensor, offset = tensors[index], begins[index]
        if offset >= end:
            return
        width = STORED[tensor.dtype].itemsize
        first = max(0, -(-(begin - offset) // width))
        last = min(tensor.elements, -(-(end - offset) // width))
        if first < last:
            at = offset + first * width - begin
            yield tensor, first, block[at : at + (last - first) * width].view(STORED[tensor.dtype])
