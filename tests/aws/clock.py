"""What takes time in the stand-in for AWS: generators that yield the seconds until they continue.

No thread sleeps: the holder of the server's lock calls `advance`, which resumes every generator that is due, as often
as it is due, as if it had run on time. So states have the same order on a slow machine as on a fast one."""

import heapq
import itertools
import threading
import time
from collections.abc import Generator

Process = Generator[float, None, None]


class Clock:
    def __init__(self) -> None:
        self._due: list[tuple[float, int, Process]] = []
        self._number = itertools.count()
        self.started = threading.Event()  # something, since the holder of the lock last cleared it

    def start(self, process: Process, at: float | None = None) -> None:
        self._step(time.monotonic() if at is None else at, process)
        self.started.set()

    def seconds_until_due(self) -> float | None:
        """None: nothing takes time."""
        return max(0.0, self._due[0][0] - time.monotonic()) if self._due else None

    def advance(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            at, _, process = heapq.heappop(self._due)
            self._step(at, process)

    def _step(self, at: float, process: Process) -> None:
        seconds = next(process, None)
        if seconds is not None:
            heapq.heappush(self._due, (at + seconds, next(self._number), process))
