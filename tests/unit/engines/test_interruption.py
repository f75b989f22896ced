"""Which signal all ranks stop for, from what each has received."""

import signal

import pytest

from hyperpod_ft.engines.interruption import flags, stop_signal

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
