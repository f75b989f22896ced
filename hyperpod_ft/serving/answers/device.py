"""The device of a server: which one an option means, whether it still computes, and whose turn it is."""

import threading
from collections import deque

import torch

from hyperpod_ft.errors import UserError, first_sentence


def device_named(name: str) -> torch.device:
    """`auto` is the GPU if torch finds one. Raises UserError for one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: {first_sentence(error)}", "use auto, cpu or cuda") from error


def is_usable(device: torch.device) -> bool:
    """Whether the device still computes: after some errors, such as a failed assertion in a kernel, it never does."""
    try:
        torch.ones(1, device=device).add_(1).item()
    except RuntimeError:
        return False
    return True


class FairLock:
    """A lock that threads acquire in the order in which they requested it.

    The holder computes. Released after every token, it lets several answers proceed side by side.
    """

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
