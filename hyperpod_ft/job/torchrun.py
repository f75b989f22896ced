"""torchrun, but it exits with the status of the rank that failed first, not always with 1, and reports that rank.

    python -m hyperpod_ft.job.torchrun [torchrun's options] [--preload MODULE ...] -m MODULE ARGUMENT...

With `--preload`, the ranks are forks of a process that has imported these modules and MODULE (forked_ranks.py).
SIGUSR1, the notice of the time limit, is forwarded to the ranks only: torchrun itself would kill them half a minute
after a signal, and a checkpoint of a large model may take longer.
"""

import argparse
import logging
import os
import signal
import sys
from contextlib import suppress
from types import FrameType

from hyperpod_ft.gc_pause import pause_collection, resume_collection
from hyperpod_ft.job import forked_ranks
from hyperpod_ft.job.recovery import report_failure
from hyperpod_ft.processes import children, signal_all
from hyperpod_ft.runs.job_files import NOTICE, shell_status


def main() -> int:
    """Run torchrun with this command line; returns its exit status as a shell would give it."""
    preloaded, arguments = _preloaded(sys.argv[1:])
    signal.signal(NOTICE, _forward_to_forks if preloaded else _forward)
    if preloaded:
        forked_ranks.start_server(preloaded)
    pause_collection()
    # after the handler: importing torch takes seconds, during which a signal would end this process
    from torch.distributed import run  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
    from torch.distributed.launcher.api import elastic_launch  # noqa: PLC0415

    resume_collection()
    # how a rank ended is one line; where torch noticed that is not worth a traceback
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_without_traceback)
    options = run.parse_args(arguments)
    config, program, its_arguments = run.config_from_args(options)
    if preloaded:
        config.start_method = "forkserver"
        program, its_arguments = forked_ranks.run_rank, [options.training_script, *options.training_script_args]
    try:
        elastic_launch(config, program)(*its_arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = shell_status(failure.exitcode)
        report_failure(rank, status, failure.timestamp)
        print(f"torchrun: rank {rank} ended first, with exit status {status}", file=sys.stderr, flush=True)
        return status
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


def _preloaded(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The modules to preload, MODULE included, and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preload", action="append", default=[])
    known, others = parser.parse_known_args(arguments)
    modules = [others[others.index("-m") + 1]] if known.preload else []
    return [*modules, *known.preload], others


def _without_traceback(record: logging.LogRecord) -> bool:
    record.exc_info = None
    return True


def _forward(number: int, _: FrameType | None) -> None:
    # an exception here would end torchrun just when its ranks should save
    with suppress(Exception):
        signal_all(children(os.getpid()), signal.Signals(number))


def _forward_to_forks(number: int, _: FrameType | None) -> None:
    with suppress(Exception):
        signal_all(forked_ranks.forked(os.getpid()), signal.Signals(number))


if __name__ == "__main__":
    sys.exit(main())
