"""torchrun, but it exits with the status of the rank that failed first, not always with 1, and reports that rank.

SIGUSR1, the notice of the time limit, is forwarded to the ranks only: torchrun itself would kill them half a minute
after a signal, and a checkpoint of a large model may take longer.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

from hyperpod_ft.job.attempts import Ending


def main() -> int:
    """Run torchrun with this command line; returns its exit status as a shell would give it."""
    signal.signal(signal.SIGUSR1, _forward)
    # after the handler: importing torch takes seconds, and a signal would end this process meanwhile
    from torch.distributed import run  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415

    try:
        run.main()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        Ending.write_here(rank, status, failure.timestamp)
        print(f"torchrun: rank {rank} ended first, with exit status {status}", file=sys.stderr, flush=True)
        return status
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


def _forward(number: int, _: FrameType | None) -> None:
    # an exception here would end torchrun just when its ranks should save
    with suppress(Exception):
        for pid in _children():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _children() -> list[int]:
    """Ids of this process's child processes."""
    if not Path("/proc/self/stat").exists():  # not Linux
        listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False).stdout
        return [
            pid for pid, parent in (map(int, line.split()) for line in listing.splitlines()) if parent == os.getpid()
        ]
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            # the program's name, in brackets, may contain spaces and brackets
            if int(file.read_text(errors="replace").rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(file.parent.name))
    return found


if __name__ == "__main__":
    sys.exit(main())
