"""What the supervisor says to the programs that start ranks on the nodes: lines on their standard input.

srun copies its own standard input to the programs of all nodes. A program whose rank has failed has reported it, and
waits for an answer: `end` first, as soon as the supervisor knows, then `begin N` for the next attempt, of which N is
the number in this job step. Every other program ends its ranks at `end`; one whose ranks are done waits as well, since
those of another node may fail yet. Without an answer within some seconds, or at the end of the input, the program ends,
and with it the step. Where the supervisor cannot reach the programs, the input ends at once.
"""

import contextlib
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator

END, _BEGIN = "end", "begin "
# From a report to `end`. The supervisor takes two; a report may be seen late on a volume that caches listings.
_ANSWER_SECONDS = 10


class Words:
    """The words that this process hears, in its main thread."""

    def __init__(self) -> None:
        self._heard: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._interruption: Callable[[], Exception] | None = None
        signal.signal(signal.SIGUSR2, self._interrupt)
        threading.Thread(target=self._listen, daemon=True).start()

    @contextlib.contextmanager
    def interrupting(self, error: Callable[[], Exception]) -> Iterator[None]:
        """While the block runs, each word raises this in it; the end of the input does not."""
        self._interruption = error
        try:
            yield
        finally:
            self._interruption = None

    def _interrupt(self, *_: object) -> None:
        if self._interruption:
            raise self._interruption()

    def _listen(self) -> None:
        heard = b""
        with contextlib.suppress(OSError):  # there may be no standard input
            while data := os.read(0, 256):
                *lines, heard = (heard + data).split(b"\n")
                for line in lines:
                    self._heard.put(line.decode())
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
        self._heard.put(None)

    def next_attempt(self) -> int:
        """Wait for the number of the next attempt, from 1; 0 if there is none."""
        seconds: float | None = _ANSWER_SECONDS
        while True:
            try:
                word = self._heard.get(timeout=seconds)
            except queue.Empty:
                return 0
            if word is None or word.startswith(_BEGIN):
                return int((word or "begin 0").removeprefix(_BEGIN))
            seconds = None


def begin(number: int) -> str:
    """The word for an attempt of a job step, from 1; the first one begins without."""
    return f"{_BEGIN}{number}"


def say(process: "subprocess.Popen[bytes]", word: str) -> None:
    """Say something to the programs that a command runs, unless it has ended."""
    assert process.stdin is not None
    with contextlib.suppress(OSError, ValueError):
        process.stdin.write(f"{word}\n".encode())
        process.stdin.flush()


def leave(process: "subprocess.Popen[bytes]") -> None:
    """Say nothing more: every program ends whose ranks have failed, now or later."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
