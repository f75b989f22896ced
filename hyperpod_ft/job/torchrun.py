"""torchrun, but it exits with the status of the rank that failed first, not always with 1, and reports that rank.

SIGUSR1, the notice of the time limit, is forwarded to the ranks only: torchrun itself would kill them half a minute
after a signal, and a checkpoint of a large model may take longer.
"""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

from hyperpod_ft.gc_pause import pause_collection, resume_collection
from hyperpod_ft.job.recovery import report_failure
from hyperpod_ft.processes import children
from hyperpod_ft.runs.job_files import NOTICE, shell_status


def main() -> int:
    """Run torchrun with this command line; returns its exit status as a shell would give it."""
    signal.signal(NOTICE, _forward)
    pause_collection()
    # after the handler: importing torch takes seconds, during which a signal would end this process
    from torch.distributed import run  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415

    resume_collection()
    try:
        run.main()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = shell_status(failure.exitcode)
        report_failure(rank, status, failure.timestamp)
        print(f"torchrun: rank {rank} ended first, with exit status {status}", file=sys.stderr, flush=True)
        return status
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


def _forward(number: int, _: FrameType | None) -> None:
    # an exception here would end torchrun just when its ranks should save
    with suppress(Exception):
        for pid in children(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main())
