"""Lines of progress while files arrive."""

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hyperpod_ft.amount import amount

_SECONDS = 5.0


def bytes_below(directory: Path) -> int:
    """Bytes of every file below a directory, those still growing included. Files may vanish meanwhile."""
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                total += path.stat().st_size
    return total


@contextmanager
def reported(what: str, directory: Path, size: int) -> Iterator[None]:
    """Print how much of `size` bytes is in `directory`, and how fast it comes, every few seconds and at the end."""
    started, before = time.monotonic(), bytes_below(directory)
    finished = threading.Event()

    def print_lines() -> None:
        then, there = started, before
        while not finished.wait(_SECONDS):
            now, here = time.monotonic(), bytes_below(directory)
            rate = max(here - there, 0) / (now - then)
            print(
                f"{what}: {amount(here)} of {amount(size)} ({min(here / max(size, 1), 1):.0%}), {amount(rate)}/s",
                flush=True,
            )
            then, there = now, here

    thread = threading.Thread(target=print_lines, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
    seconds = time.monotonic() - started
    print(f"{what}: {amount(max(size - before, 0))} in {seconds:.1f} s", flush=True)
