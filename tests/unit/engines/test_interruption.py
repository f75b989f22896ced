"""Which signal all ranks stop for, from what each has received."""

import signal
import subprocess
import sys

import pytest

from hyperpod_ft.engines.ranks import flags, stop_signal

NOTICE, TERMINATION = int(signal.SIGUSR1), int(signal.SIGTERM)


@pytest.mark.parametrize(
    ("received", "expected"),
    [
        (([], []), 0),
        (([NOTICE, NOTICE], []), NOTICE),
        (([NOTICE], [TERMINATION]), TERMINATION),
        (([signal.SIGINT], []), 0),
    ],
)
def test_ranks_stop_for_the_strongest_signal_that_any_received(received: tuple[list[int], ...], expected: int) -> None:
    assert stop_signal([sum(column) for column in zip(*map(flags, received), strict=True)]) == expected


PROGRAM = """
import os, signal
from hyperpod_ft.engines.ranks import collect_signals, flags, stop_signal
with collect_signals() as received:
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stop_signal(flags(received)) == signal.SIGUSR1
os.kill(os.getpid(), {again})
print("went on")
"""


def after_training(again: int) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", PROGRAM.format(again=int(again))]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_notice_that_comes_again_does_not_end_the_process() -> None:
    """The record is still to be written."""
    assert after_training(signal.SIGUSR1).stdout == "went on\n"


def test_sigterm_after_training_ends_the_process() -> None:
    assert after_training(signal.SIGTERM).returncode == -signal.SIGTERM
