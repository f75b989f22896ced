"""Graceful stop: Slurm's scancel and time limit send a signal before they kill the job."""

import contextlib
import signal
from collections.abc import Iterator, Sequence
from types import FrameType

from hyperpod_ft.runs.signals import NOTICE, STOP_SIGNALS


class Interrupted(Exception):  # noqa: N818 - not an error
    """Training stopped at a step boundary because of a signal; as a rule, a checkpoint of that step was saved."""

    def __init__(self, step: int, signal_number: int, saved: bool = True) -> None:
        super().__init__(step, signal_number, saved)
        self.step = step
        self.signal_number = signal_number
        self.saved = saved

    def __str__(self) -> str:
        name = signal.Signals(self.signal_number).name
        if not self.saved:
            return (
                f"{name}: stopped after step {self.step}, without saving it (training.save_only_model):"
                " the next attempt starts again"
            )
        return f"{name}: stopped after step {self.step}, which is saved; run again to resume"

    @property
    def exit_status(self) -> int:
        """What a shell reports for a process killed by the signal."""
        return 128 + self.signal_number


@contextlib.contextmanager
def collect_signals() -> Iterator[list[int]]:
    """While the block runs, append arriving signals to the list instead of ending the process.

    After it, notices are ignored.
    """
    received: list[int] = []

    def append(number: int, _: FrameType | None) -> None:
        received.append(number)

    previous = {number: signal.signal(number, append) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            # a notice may come again; what it asks for is done, and its default action would end the process
            signal.signal(number, signal.SIG_IGN if number == NOTICE else handler)


def flags(received: Sequence[int]) -> list[float]:
    """A 1.0 for each of STOP_SIGNALS that this rank received, else 0.0: what ranks add up, for `stop_signal`."""
    return [float(known in received) for known in STOP_SIGNALS]


def stop_signal(sums: Sequence[float]) -> int:
    """The signal to stop for, from the sums of all ranks' `flags`; 0: no rank received one. SIGTERM comes first."""
    return int(max((known for known, ranks in zip(STOP_SIGNALS, sums, strict=True) if ranks), default=0))
