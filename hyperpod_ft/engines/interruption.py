"""Stopping a training on request: Slurm's scancel and time limit send a signal before they kill."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

# SIGTERM: scancel, torchrun passing on its own end. SIGUSR1: `sbatch --signal=USR1@300`, notice of the time limit.
SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


class Interrupted(Exception):  # noqa: N818 - not an error
    """Training stopped at a step boundary because of a signal; a checkpoint of that step was saved."""

    def __init__(self, step: int, signal_number: int) -> None:
        super().__init__(step, signal_number)
        self.step = step
        self.signal_number = signal_number

    def __str__(self) -> str:
        name = signal.Signals(self.signal_number).name
        return f"{name}: stopped after step {self.step}, which is saved; run again to resume"

    @property
    def exit_status(self) -> int:
        """What a shell would report for a process that the signal killed."""
        return 128 + self.signal_number


@contextlib.contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """While the block runs, add arriving signals to the list instead of ending the process."""
    asked: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        asked.append(number)

    previous = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
