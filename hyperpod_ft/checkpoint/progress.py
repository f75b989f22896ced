"""Progress of streaming, on stderr: a bar with bytes per second on a terminal, a line every few seconds in a log."""

import sys
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from hyperpod_ft.amount import amount


class Progress:
    """Counts bytes, from any thread."""

    def __init__(self, what: str, total_bytes: int, every_seconds: float = 5.0) -> None:
        self._what = what
        self._total = total_bytes
        self._every = every_seconds
        self._done = 0
        self._started = self._printed = time.monotonic()
        self._counting = threading.Lock()
        self._bar: Bar | None = None
        if sys.stderr.isatty():
            columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(what, total=total_bytes)

    def __enter__(self) -> "Progress":
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
        line = f"{self._what}: {amount(self._done)} of {amount(self._total)}, {amount(rate)}/s"
        print(line, file=sys.stderr, flush=True)
