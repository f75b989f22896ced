"""torchrun, which on its own always exits with 1: here with the status of the rank that failed first, and its number.

Everything else is torchrun's. SIGUSR1, the notice of the time limit, goes to the ranks and nowhere else: what torchrun
does with a signal gives the ranks half a minute, which a checkpoint of a large model may exceed.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

from hyperpod_ft.runs.restarts import Ending


def main() -> int:
    """Run torchrun with this command line; returns its exit status as a shell would give it."""
    signal.signal(signal.SIGUSR1, _hand_on)
    # after the handler: importing torch takes seconds, and a signal would end this process meanwhile
    from torch.distributed import run  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415

    try:
        run.main()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        Ending.leave_here(rank, status, failure.timestamp)
        print(f"torchrun: rank {rank} ended first, with exit status {status}", file=sys.stderr, flush=True)
        return status
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


def _hand_on(number: int, _: FrameType | None) -> None:
    # whatever fails here would end torchrun just when its ranks should save
    with suppress(Exception):
        for pid in _children():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _children() -> list[int]:
    """The processes that this one has started."""
    if not Path("/proc/self/stat").exists():  # not Linux
        listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False).stdout
        return [
            pid for pid, parent in (map(int, line.split()) for line in listing.splitlines()) if parent == os.getpid()
        ]
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            # the name, in brackets, may hold anything
            if int(file.read_text(errors="replace").rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(file.parent.name))
    return found


if __name__ == "__main__":
    sys.exit(main())
