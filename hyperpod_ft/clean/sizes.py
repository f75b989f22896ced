"""How much a tree takes on disk, and when it last changed. Trees are read by several threads: a shared volume answers
each request slowly, and many at once."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_THREADS = 16
_BLOCK = 512  # bytes, the unit of st_blocks


@dataclass(frozen=True)
class DiskUsage:
    """What a file or tree takes."""

    size: int = 0  # bytes on disk
    changed: float = 0.0  # Unix time of the newest change

    def __add__(self, other: "DiskUsage") -> "DiskUsage":
        return DiskUsage(self.size + other.size, max(self.changed, other.changed))


def usages(paths: Iterable[Path]) -> dict[Path, DiskUsage]:
    """What each file or tree takes. What cannot be read counts as empty."""
    found = {path: _own(path) for path in paths}
    # each entry by itself: one tree may hold nearly everything
    children = [(path, child) for path in found for child in _children(path)]
    with ThreadPoolExecutor(_THREADS) as pool:
        for (path, _), usage in zip(children, pool.map(_usage_of, [child for _, child in children]), strict=True):
            found[path] += usage
    return found


def _children(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [] if path.is_symlink() else [entry.path for entry in entries]
    except OSError:  # a file
        return []


def _own(path: Path) -> DiskUsage:
    try:
        status = path.lstat()
    except OSError:
        return DiskUsage()
    return DiskUsage(status.st_blocks * _BLOCK, status.st_mtime)


def _usage_of(path: str) -> DiskUsage:
    """Of a tree, without following links. Hard links are counted as often as they are found."""
    total, newest, waiting = 0, 0.0, [path]
    while waiting:
        current = waiting.pop()
        try:
            status = os.lstat(current)
            total += status.st_blocks * _BLOCK
            newest = max(newest, status.st_mtime)
            if (status.st_mode & 0o170000) == 0o040000:
                with os.scandir(current) as entries:
                    waiting += [entry.path for entry in entries]
        except OSError:
            continue
    return DiskUsage(total, newest)
