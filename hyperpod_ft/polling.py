"""How often AWS and Slurm are polled."""

import os
import time

# For tests and rehearsals, whose stand-in for AWS answers at once.
_VARIABLE = "HYPERPOD_FT_POLL_SECONDS"


def poll_seconds(usual: float) -> float:
    """The pause between two requests for a state, in seconds: `usual`, unless the environment sets another."""
    return float(os.environ.get(_VARIABLE) or usual)


def pause(usual: float) -> None:
    """Sleep between two such requests."""
    time.sleep(poll_seconds(usual))
