"""Processes a file's blocks with threads in any order, and computes their digest in file order."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

import xxhash

from hyperpod_ft.checkpoint.tensors.elements import Stored
from hyperpod_ft.processes import usable_cpus

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
