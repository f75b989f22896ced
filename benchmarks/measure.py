"""Measures one child process: wall time until its output is on disk, CPU time, peak memory, bytes written.

CPU time, bytes written and the memory of the largest process are the kernel's figures for the child and all descendants
that it waited for (`wait4`). If a child has children of its own, the sum of their memory is also sampled (proportional
set sizes, so that shared pages count once), and the larger figure is the peak.
"""

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SAMPLE_SECONDS = 0.1
_BLOCK_BYTES = 512  # the unit of ru_oublock


@dataclass(frozen=True)
class Measurement:
    """wall, cpu: seconds, `cpu` is user plus system; peak: bytes of memory; written: bytes to storage."""

    wall: float
    cpu: float
    peak: int
    written: int


class CommandError(Exception):
    """A child that exited non-zero, with the last line of its output."""


def measure(
    command: Sequence[str], environment: Mapping[str, str], log: Path, outputs: Callable[[], Iterable[Path]]
) -> Measurement:
    """Run `command` with `environment` added to this process's own; `outputs`, called afterwards, lists what it wrote.

    The time ends when the outputs are on disk, even if the command does not sync them. This process must be small:
    until the child calls exec, its parent's memory counts as its own. Raises CommandError.
    """
    with log.open("wb") as stream:
        start = time.perf_counter()
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=os.environ | dict(environment)
        )
        tree = _Tree(child.pid)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        peak = max(usage.ru_maxrss * 1024, tree.stop())
    if child.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise CommandError(f"exit code {child.returncode}: {lines[-1] if lines else 'no output'}")
    for path in outputs():
        sync(path)
    wall = time.perf_counter() - start
    return Measurement(wall, usage.ru_utime + usage.ru_stime, peak, usage.ru_oublock * _BLOCK_BYTES)


class _Tree:
    """Samples the memory of a process and its descendants while there are any."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def stop(self) -> int:
        """The largest sum seen, in bytes; 0 when the process had no child."""
        self._ended.set()
        self._thread.join()
        return self._peak

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            processes = _descendants(self._root)
            if len(processes) > 1:
                self._peak = max(self._peak, sum(_proportional_set_size(process) for process in processes))


def _descendants(root: int) -> list[int]:
    """A process and its descendants, except those that end during the listing."""
    found = [root]
    for process in found:  # the list grows during the loop
        try:
            for task in Path(f"/proc/{process}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text(encoding="ascii").split()]
        except OSError:
            continue
    return found


def _proportional_set_size(process: int) -> int:
    """Bytes; a page that n processes share counts 1/n."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:  # it has ended
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def sync(path: Path) -> None:
    """Flush a file, or every file and directory of a tree, to disk."""
    for entry in (path, *path.rglob("*")):
        descriptor = os.open(entry, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def evict(path: Path) -> None:
    """Drop a file or a tree from the page cache, so that the next reader reads it from disk.

    Only the inputs: with the programs' own files a round would measure how long their imports take from a cold disk.
    """
    for entry in (path, *path.rglob("*")):
        if entry.is_file():
            descriptor = os.open(entry, os.O_RDONLY)
            os.fsync(descriptor)  # data that is not on disk yet would stay in the cache
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
