"""Divides a transfer among processes: in one, threads wait for each other's turn to run Python (the GIL).

Reading from TLS gives Python 16 KiB at a time, so that one process transfers a few Gb/s at most, whatever its threads.
The processes are forks, which start at once with the parent's credentials; a program with running threads uses one
process.
"""

import contextlib
import os
import pickle
import selectors
import signal
import struct
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeVar

from hyperpod_ft.aws.s3 import crt
from hyperpod_ft.processes import die_with_parent, usable_cpus

Item = TypeVar("Item")
# Transfers these items in this number of threads, and calls the function with the number of bytes as they arrive.
Work = Callable[[Sequence[Item], int, Callable[[int], object]], None]

WORTH_BYTES = 128 << 20  # for less, starting processes takes longer than it saves
_MAX_PROCESSES, _MIN_THREADS = 8, 4
_REQUEST_BYTES = 1 << 20  # what a request costs, in bytes that could be transferred in that time
_COUNT = struct.Struct("<q")  # bytes that were transferred; -1: an error follows


def run(
    client: Any,
    items: Collection[Item],
    size: Callable[[Item], int],
    threads: int,
    work: Work[Item],
    done: Callable[[int], object],
) -> None:
    """Call `work` with all items, in one process or divided among several; `done` is called here, with bytes.

    `threads`: those of all processes together. After the first error in any process all end; raises it.
    """
    # AWS's native client has its own threads, which do not survive a fork, and is meant for one process on a machine
    count = 1 if crt.is_used(client) else _processes([size(item) for item in items])
    if count == 1:
        work(list(items), threads, done)
        return
    each = max(_MIN_THREADS, threads // count)
    children = [_Child(client, share, each, work) for share in divided(items, size, count)]
    try:
        with selectors.DefaultSelector() as reading:
            for child in children:
                reading.register(child.pipe, selectors.EVENT_READ, child)
            while reading.get_map():
                for key, _ in reading.select():
                    if not key.data.receive(done):
                        reading.unregister(key.fileobj)
                        key.data.check()
    finally:
        for child in children:
            child.end()


def divided(items: Collection[Item], size: Callable[[Item], int], count: int) -> list[list[Item]]:
    """Shares of about the same cost, the largest items first; none is empty."""
    shares: list[list[Item]] = [[] for _ in range(count)]
    costs = [0] * count
    for item in sorted(items, key=size, reverse=True):
        least = costs.index(min(costs))
        shares[least].append(item)
        costs[least] += size(item) + _REQUEST_BYTES
    return [share for share in shares if share]


def _processes(sizes: Collection[int]) -> int:
    # elsewhere a child cannot ask the system to end it with its parent
    if sum(sizes) < WORTH_BYTES or threading.active_count() > 1 or sys.platform != "linux":
        return 1
    large = sum(size >= WORTH_BYTES // 16 for size in sizes)
    return max(1, min(usable_cpus(), _MAX_PROCESSES, large))


class _Child:
    """A process that transfers one share, and reports its progress through a pipe."""

    def __init__(self, client: Any, share: Sequence[Item], threads: int, work: Work[Item]) -> None:
        self.pipe, write = os.pipe()
        self._received = b""
        self._error: BaseException | None = None
        parent = os.getpid()
        self._pid = os.fork()
        if not self._pid:
            _do(client, partial(work, share, threads), write, parent)
        os.close(write)

    def receive(self, done: Callable[[int], object]) -> bool:
        """Read what it has sent; False when that was all."""
        block = os.read(self.pipe, 1 << 16)
        self._received += block
        while len(self._received) >= _COUNT.size:
            (count,) = _COUNT.unpack_from(self._received)
            if count < 0:
                break
            self._received = self._received[_COUNT.size :]
            done(count)
        return bool(block)

    def check(self) -> None:
        """Raise the error that it ended with."""
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        if self._received:
            raise pickle.loads(self._received[_COUNT.size :])  # noqa: S301 - from our own fork
        if code := os.waitstatus_to_exitcode(status):
            raise RuntimeError(f"a process that transferred files ended with exit status {code}")

    def end(self) -> None:
        """Interrupt it, so that it cleans up, and wait."""
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGINT)
            os.waitpid(self._pid, 0)
            self._pid = 0
        os.close(self.pipe)


def _do(client: Any, work: Callable[[Callable[[int], object]], None], pipe: int, parent: int) -> None:
    """Runs in the forked process; never returns."""
    status = 1
    try:
        die_with_parent(parent, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        client.close()  # its connections are the parent's
        work(lambda count: os.write(pipe, _COUNT.pack(count)))
        status = 0
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(pipe, _COUNT.pack(-1) + pickle.dumps(error))
    finally:
        os._exit(status)
