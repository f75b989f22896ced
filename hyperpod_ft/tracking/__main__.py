"""Publishes a run to its trackers while it trains.

    python -m hyperpod_ft.tracking RUN_DIR      ends a short time after its standard input has ended, or after SIGTERM

The supervisor of a training starts it on the first node. When the supervisor dies, that input ends too.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from hyperpod_ft.errors import EXIT_USER_ERROR, UserError, print_error
from hyperpod_ft.runs.run import Run
from hyperpod_ft.tracking.follower import Shutdown, follow

_LAST_SECONDS = 30.0  # accelerators wait for it
_LAST_SECONDS_OF_CANCELLED = 10.0  # of the 20 or 30 s between SIGTERM and SIGKILL


def main() -> int:
    """Run the command line; returns the exit status."""
    shutdown = Shutdown()

    def cancel(*_: int | FrameType | None) -> None:
        shutdown.begin(_LAST_SECONDS_OF_CANCELLED)

    def await_end_of_input() -> None:
        sys.stdin.buffer.read()
        shutdown.begin(_LAST_SECONDS)

    signal.signal(signal.SIGTERM, cancel)
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    try:
        run = Run.open(Path(sys.argv[1]))
    except UserError as error:
        print_error("tracking", str(error))
        return EXIT_USER_ERROR
    threading.Thread(target=await_end_of_input, daemon=True).start()
    os.nice(10)
    for tracker, state in follow(run, shutdown).items():
        lag = f"; {state.problem}; to catch up: hyperpod-ft track {run.paths.directory}" if state.problem else ""
        print(f"tracking: {tracker}: published to step {state.step} {state.where}{lag}", flush=True)
    # the thread that reads stdin may still wait for its end
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
