"""Waits for what another process or thread does."""

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

Found = TypeVar("Found")


class Process(Protocol):
    """A `subprocess.Popen`, or what stands in for one."""

    def poll(self) -> int | None: ...


def wait_for(
    condition: Callable[[], Found | None],
    seconds: float = 300,
    what: str | Callable[[], object] = "",
    *,
    every: float = 0.02,
    process: Process | None = None,
) -> Found:
    """The first value of a condition that counts as true; it is asked again after `every` seconds.

    `AssertionError` after `seconds`, or as soon as `process` has ended without it, with `what`, or what that returns.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        ended = process is not None and process.poll() is not None
        if ended or time.monotonic() > deadline:
            why = "the process ended before" if ended else f"not so after {seconds:g} s"
            raise AssertionError(f"{why}: {what() if callable(what) else what}".removesuffix(": "))
        time.sleep(every)
    return found
