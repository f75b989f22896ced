"""Progress of streaming, as lines for the log of a job."""

import time


class Progress:
    """Counts bytes; prints a line when some seconds have passed since the last."""

    def __init__(self, what: str, total_bytes: int, every_seconds: float = 5.0) -> None:
        self._what = what
        self._total = total_bytes
        self._every = every_seconds
        self._done = 0
        self._started = self._printed = time.monotonic()

    def add(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._printed >= self._every:
            self._printed = now
            rate = self._done / (now - self._started) / 1e6
            print(f"{self._what}: {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB, {rate:.0f} MB/s", flush=True)
