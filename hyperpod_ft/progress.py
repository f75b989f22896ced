"""How long work reports its progress: in lines, or in bytes: a bar on a terminal, a line every few seconds in a log;
and how often AWS and Slurm are asked for theirs.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

PrintLine = Callable[[str], None]  # takes one line of progress


@dataclass(frozen=True)
class ChangeReporter:
    """Reports the states of what is followed, each when it differs from the last one under its name."""

    report: PrintLine
    _states: dict[str, str] = field(default_factory=dict)

    def __call__(self, name: str, state: str, before: str = "") -> None:
        """`before`: stands before the state in the line, and is no part of it."""
        if self._states.get(name) != state:
            self._states[name] = state
            self.report(f"{name}: {before}{state}")


GB = 1e9
_UNITS = {"GB": GB, "MB": 1e6, "kB": 1e3}  # bytes, from the largest to the smallest
_SECONDS = 5.0


def count(number: int, noun: str) -> str:
    """A number with its noun: `1 node`, `1,200 steps`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def format_bytes(size: float) -> str:
    """A size in decimal units, as disks and networks are sold: `1.5 GB`."""
    name, unit = next((known for known in _UNITS.items() if size >= known[1]), ("kB", _UNITS["kB"]))
    return f"{size / unit:.1f} {name}"


def parse_bytes(text: str) -> float:
    """The size that `format_bytes` wrote, as precise as it wrote it."""
    number, name = text.split(" ")
    return float(number) * _UNITS[name]


def format_minutes(seconds: float) -> str:
    """A time to wait: `60 minutes`."""
    return f"{seconds / 60:.0f} minutes"


def format_duration(seconds: float) -> str:
    """A time that passes: `5s`, `1m20s`, `2h01m`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes_left:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


class ByteProgress:
    """Counts bytes from any thread, and shows them with their rate on stderr."""

    def __init__(self, what: str, total_bytes: int, every_seconds: float = _SECONDS) -> None:
        self._what = what
        self._total = total_bytes
        self._every = every_seconds
        self._done = 0
        self._started = self._printed = time.monotonic()
        self._counting = threading.Lock()
        self._bar = _bar(what) if sys.stderr.isatty() else None
        if self._bar:
            self._task = self._bar.add_task(what, total=total_bytes)

    def __enter__(self) -> "ByteProgress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def add(self, count: int) -> None:
        if self._bar:
            self._bar.advance(self._task, count)
            return
        with self._counting:
            self._done += count
            now = time.monotonic()
            if now - self._printed < self._every:
                return
            self._printed = now
            rate = self._done / (now - self._started)
        line = f"{self._what}: {format_bytes(self._done)} of {format_bytes(self._total)}, {format_bytes(rate)}/s"
        print(line, file=sys.stderr, flush=True)


def _bar(what: str) -> "Bar":
    # commands that only format sizes start without rich
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def bytes_below(directory: Path) -> int:
    """The total size of all files below a directory, including files still being written."""
    total = 0
    for path in directory.rglob("*"):
        # another process may remove it
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                total += path.stat().st_size
    return total


@contextmanager
def activity(what: str) -> Iterator[None]:
    """Show on a terminal what the block is doing; erased afterwards, and never written to a log."""
    if not sys.stderr.isatty():
        yield
        return
    print(what, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # ECMA-48: to column 1, erase to the end of the line


@contextmanager
def report_growth(what: str, directory: Path, size: int) -> Iterator[None]:
    """Print how much of `size` bytes is in `directory` and the rate, every few seconds and at the end."""
    started, before = time.monotonic(), bytes_below(directory)
    finished = threading.Event()

    def print_lines() -> None:
        last_time, last_size = started, before
        while not finished.wait(_SECONDS):
            now, done = time.monotonic(), bytes_below(directory)
            rate = max(done - last_size, 0) / (now - last_time)
            print(
                f"{what}: {format_bytes(done)} of {format_bytes(size)} ({min(done / max(size, 1), 1):.0%}),"
                f" {format_bytes(rate)}/s",
                flush=True,
            )
            last_time, last_size = now, done

    thread = threading.Thread(target=print_lines, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
    seconds = time.monotonic() - started
    print(f"{what}: {format_bytes(max(size - before, 0))} in {seconds:.1f} s", flush=True)


# For tests and rehearsals, whose stand-in for AWS answers at once.
_VARIABLE = "HYPERPOD_FT_POLL_SECONDS"


def poll_seconds(usual: float) -> float:
    """The pause between two requests for a state, in seconds: `usual`, unless the environment sets another."""
    return float(os.environ.get(_VARIABLE) or usual)


def pause(usual: float) -> None:
    """Sleep between two such requests."""
    time.sleep(poll_seconds(usual))


def polls(usual: float) -> Iterator[float]:
    """Requests for a state, for a loop that ends itself: yields how long it has waited, in seconds, 0 at first."""
    began, waited = time.monotonic(), 0.0
    while True:
        yield waited
        pause(usual)
        waited = time.monotonic() - began
