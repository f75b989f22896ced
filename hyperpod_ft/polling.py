"""How often AWS and Slurm are polled."""

import os
import time
from collections.abc import Iterator

# For tests and rehearsals, whose stand-in for AWS answers at once.
_VARIABLE = "HYPERPOD_FT_POLL_SECONDS"


def poll_seconds(usual: float) -> float:
    """The pause between two requests for a state, in seconds: `usual`, unless the environment sets another."""
    return float(os.environ.get(_VARIABLE) or usual)


def pause(usual: float) -> None:
    """Sleep between two such requests."""
    time.sleep(poll_seconds(usual))


def polls(usual: float) -> Iterator[float]:
    """Requests for a state, for a loop that ends itself: yields how long it has waited, in seconds, 0 at first."""
    began, waited = time.monotonic(), 0.0
    while True:
        yield waited
        pause(usual)
        waited = time.monotonic() - began
