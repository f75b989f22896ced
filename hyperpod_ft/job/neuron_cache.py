"""The Neuron compile cache on disk: its compiled graphs, its damaged entries, and the jobs that use it.

Engine neuron (PyTorch/XLA) has a directory for each graph:

    <cache>/neuronxcc-<version>/MODULE_<hash of the graph>+<hash of the compiler's flags>/
        model.hlo_module.pb[.gz], compile_flags.json   the graph, as it was extracted
        model.hlo_module.pb.lock                       while a process compiles it; a killed compiler leaves it behind,
                                                       and the next process that needs the graph waits forever
        model.neff, then model.done                    the compiled graph
        model.log                                      instead of both: why compilation failed

Sources: AWS's Neuron documentation ("Neuron Persistent Cache", "neuron_parallel_compile CLI", "Work with NEFF Files");
huggingface.co/aws-neuron/optimum-neuron-cache, which is such a directory; for the locks, reports by users.

Engine torch (TorchNeuron) has a file for each, which appears under this name when it is whole; its locks are elsewhere,
and end with their processes (read in torch-neuronx's code, csrc/core/cache/):

    <cache>/ab/cd/abcd....neff
"""

import contextlib
import fcntl
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hyperpod_ft import publish

_NEFF_HEADER_BYTES = 1024
_NEFF_SIZES = struct.Struct("<8xQQ")  # after pkg_version: header_size, data_size
# While other jobs use the cache, an entry unchanged for this long is abandoned: the largest graphs compile for an hour
# or two.
_ABANDONED_SECONDS = 6 * 3600


def finished(cache: Path) -> set[str]:
    """The compiled graphs, by their path within the cache."""
    return {_name(cache, entry) for entry in _entries(cache) if not why_unfinished(entry)}


def unfinished(cache: Path) -> dict[str, str]:
    """The graphs without a compiled result, each with the reason."""
    reasons = {_name(cache, entry): why_unfinished(entry) for entry in _entries(cache)}
    return {name: reason for name, reason in reasons.items() if reason}


def why_unfinished(entry: Path) -> str:
    """Why an entry is unusable; empty when it has a whole NEFF, and a directory is marked as done."""
    if entry.is_dir() and not (entry / "model.done").is_file():
        return _first_line(entry / "model.log") or "not compiled"
    neff = neff_of(entry)
    try:
        size = neff.stat().st_size
        with neff.open("rb") as stream:
            header_bytes, data_bytes = _NEFF_SIZES.unpack(stream.read(_NEFF_SIZES.size))
    except (OSError, struct.error):
        return _first_line(entry / "model.log") or "has no NEFF"
    whole = max(header_bytes, _NEFF_HEADER_BYTES) + data_bytes
    return "" if size >= whole else f"its NEFF has {size} of {whole} bytes"


def neff_of(entry: Path) -> Path:
    """The compiled graph of an entry."""
    return entry / "model.neff" if entry.is_dir() else entry


@contextlib.contextmanager
def using(cache: Path) -> Iterator[list[str]]:
    """Remove damaged entries, then use the cache for the block, shared with other jobs; yields what was removed.

    The first user knows that no process compiles: each lock and each unfinished entry is abandoned. Later users remove
    only entries that are marked as done but not whole, and those unchanged for hours.
    """
    cache.mkdir(parents=True, exist_ok=True)
    # held exclusively for the repair, then shared, by the process that starts the compilers; released when it ends
    with (cache / "users.lock").open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except BlockingIOError:
            alone = False
        removed = repair(cache, alone=alone)
        fcntl.flock(stream, fcntl.LOCK_SH)
        yield removed


def repair(cache: Path, *, alone: bool) -> list[str]:
    """Remove damaged entries and stale locks; returns the names of what was removed. `alone`: see `using`."""
    removed = []
    for entry in sorted(_entries(cache)):
        abandoned = alone or _seconds_untouched(entry) > _ABANDONED_SECONDS
        broken = entry.is_file() or (entry / "model.done").exists()
        if why_unfinished(entry) and (abandoned or broken):
            publish.remove(entry)
            removed.append(_name(cache, entry))
        elif abandoned and entry.is_dir():
            for lock in entry.glob("*.lock"):
                lock.unlink(missing_ok=True)
                removed.append(_name(cache, lock))
    return removed


def print_removed(stage: str, removed: Sequence[str]) -> None:
    """One line for each entry that was removed, in the log of the stage."""
    for name in removed:
        print(f"{stage}: removed a damaged or abandoned entry from the compile cache: {name}", flush=True)


def _entries(cache: Path) -> Iterator[Path]:
    yield from (entry for entry in cache.glob("neuronxcc-*/MODULE_*") if entry.is_dir())
    yield from cache.glob("[0-9a-f][0-9a-f]/[0-9a-f][0-9a-f]/*.neff")


def _name(cache: Path, path: Path) -> str:
    return path.relative_to(cache).as_posix()


def _first_line(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as stream:
            return stream.readline(2000).strip()
    except OSError:
        return ""


def _seconds_untouched(entry: Path) -> float:
    try:
        within = list(entry.iterdir()) if entry.is_dir() else []
        return time.time() - max(path.stat().st_mtime for path in (entry, *within))
    except FileNotFoundError:  # another job is changing it
        return 0.0
