"""torchrun, but it exits with the status of the rank that failed first, not always with 1, and reports that rank.

SIGUSR1, the notice of the time limit, is forwarded to the ranks only: torchrun itself would kill them half a minute
after a signal, and a checkpoint of a large model may take longer.
"""

import os
import signal
import sys
from argparse import Namespace
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType

from hyperpod_ft.gc_pause import pause_collection, resume_collection
from hyperpod_ft.job.job_host import this_host
from hyperpod_ft.job.recovery import report_failure
from hyperpod_ft.job.watch import NodePlace, Store, Watch
from hyperpod_ft.processes import children
from hyperpod_ft.runs.job_files import KILLED_STATUS, NOTICE, shell_status


def main() -> int:
    """Run torchrun with this command line; returns its exit status as a shell would give it."""
    signal.signal(NOTICE, _forward)
    pause_collection()
    # after the handler: importing torch takes seconds, during which a signal would end this process
    from torch.distributed import run  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415

    resume_collection()
    watch = _watch(run.parse_args(sys.argv[1:]))
    try:
        with watch:
            run.main()
    except ChildFailedError as error:
        if watch.found_hang:  # and reported
            return KILLED_STATUS
        rank, failure = error.get_first_failure()
        status = shell_status(failure.exitcode)
        report_failure(rank, status, failure.timestamp)
        print(f"torchrun: rank {rank} ended first, with exit status {status}", file=sys.stderr, flush=True)
        return status
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


def _watch(options: Namespace) -> Watch:
    """The watch of this node's ranks; `options`: of torchrun."""
    from torch.distributed import HashStore, PrefixStore, TCPStore  # noqa: PLC0415

    nodes, ranks = int(options.nnodes.partition(":")[0]), int(options.nproc_per_node)

    def connect() -> Store:
        if nodes == 1:
            return HashStore()
        # other nodes may still check their health
        waiting = timedelta(days=1)
        store = TCPStore(options.master_addr, options.master_port, None, False, waiting, wait_for_workers=False)
        return PrefixStore("hyperpod_ft/watch", store)

    place = NodePlace(this_host().name, options.node_rank, nodes, options.node_rank * ranks)
    return Watch(connect, place, ranks, Path(options.training_script_args[0]))


def _forward(number: int, _: FrameType | None) -> None:
    # an exception here would end torchrun just when its ranks should save
    with suppress(Exception):
        for pid in children(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main())
