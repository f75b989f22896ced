"""A lock that threads acquire in the order in which they requested it."""

import threading
from collections import deque


class FairLock:
    """The holder computes. Released after every token, it lets several answers proceed side by side."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._held = False

    def acquire(self) -> None:
        with self._guard:
            if not self._held:
                self._held = True
                return
            ticket = threading.Lock()
            ticket.acquire()
            self._waiting.append(ticket)
        # released by the holder before, who keeps the lock held for this thread
        ticket.acquire()

    def release(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
