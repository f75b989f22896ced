"""torchrun, but it exits with the status of the rank that failed first, not always with 1, and reports that rank.

    python -m hyperpod_ft.job.torchrun [torchrun's options] [--preload MODULE] [--check COMMAND] -m MODULE ARGUMENT...

With `--preload`, the ranks are forks of a process that has imported that module and MODULE (forked_ranks.py). When a
rank has failed, it starts them again if the supervisor says so (words.py), and if COMMAND then ends with status 0.
SIGUSR1, the notice of the time limit, is forwarded to the ranks only: torchrun itself would kill them half a minute
after a signal, and a checkpoint of a large model may take longer.
"""

import argparse
import contextlib
import gc
import logging
import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType

from hyperpod_ft import heartbeat
from hyperpod_ft.gc_pause import pause_collection, resume_collection
from hyperpod_ft.job import forked_ranks
from hyperpod_ft.job.job_host import port_after, this_host
from hyperpod_ft.job.recovery import report_failure
from hyperpod_ft.job.watch import NodePlace, Store, Watch
from hyperpod_ft.job.words import Words
from hyperpod_ft.processes import children, signal_all
from hyperpod_ft.runs.job_files import ATTEMPTS_BEFORE, KILLED_STATUS, NOTICE, shell_status


def main() -> int:
    """Run torchrun with this command line; returns its exit status as a shell would give it."""
    own, arguments = _options(sys.argv[1:])
    signal.signal(NOTICE, _forward_to_forks if own.preload else _forward)
    if own.preload:
        forked_ranks.start_server(_modules(own, arguments))
    words = Words()
    pause_collection()
    # after the handlers: importing torch takes seconds, during which a signal would end this process
    from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: PLC0415

    resume_collection()
    # how a rank ended is one line; where torch noticed that is not worth a traceback
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_without_traceback)
    attempt = 0
    while True:
        try:
            with words.interrupting(lambda: SignalException("the attempt is over", signal.SIGKILL)):
                status, waits = _attempt(own, arguments, attempt)
        except SignalException as stopped:
            status, waits = 128 + int(stopped.sigval), stopped.sigval == signal.SIGKILL
        gc.collect()  # with its store, for which torchrun on another node may wait
        # torch has replaced them; and it would not notice them while it waits for other nodes
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        attempt = words.next_attempt() if waits else 0
        if not attempt:
            return status
        os.environ[ATTEMPTS_BEFORE] = str(attempt)
        if own.check and (status := subprocess.run(shlex.split(own.check), check=False).returncode):
            return shell_status(status)


def _attempt(own: argparse.Namespace, arguments: list[str], number: int) -> tuple[int, bool]:
    """Run the ranks once; returns the exit status, and whether it may have to run them again."""
    from torch.distributed import run  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
    from torch.distributed.launcher.api import elastic_launch  # noqa: PLC0415

    options = run.parse_args(arguments)
    if options.master_port:  # else a free port is taken
        options.master_port = port_after(int(options.master_port), number)
    config, program, its_arguments = run.config_from_args(options)
    watch = _watch(options)

    def report(local_rank: int, status: int, moment: float) -> None:
        if watch.found_hang:  # and reported
            return
        rank = options.node_rank * int(options.nproc_per_node) + local_rank
        print(f"torchrun: rank {rank} ended first, with exit status {status}", file=sys.stderr, flush=True)
        report_failure(rank, status, moment)

    first = None
    try:
        with watch, contextlib.ExitStack() as looking:
            if own.preload:
                forked_ranks.start_server(_modules(own, arguments))  # again, if it was killed
                config.start_method = "forkserver"
                beats, module = os.environ[heartbeat.FILES], options.training_script
                first = forked_ranks.FirstFailure(beats, report)
                looking.enter_context(first.watching())
                program = forked_ranks.run_rank
                its_arguments = [first, module, *options.training_script_args]  # type: ignore[list-item]
            elastic_launch(config, program)(*its_arguments)
    except ChildFailedError as error:
        if watch.found_hang:
            return KILLED_STATUS, True
        if first is not None and first.status:
            return first.status, True
        _, failure = error.get_first_failure()
        status = shell_status(failure.exitcode)
        report(failure.local_rank, status, failure.timestamp)
        return status, True
    return 0, config.max_nodes > 1


def _options(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this program, and torchrun's arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preload", default="")
    parser.add_argument("--check", default="")
    return parser.parse_known_args(arguments)


def _modules(own: argparse.Namespace, arguments: list[str]) -> list[str]:
    return [own.preload, arguments[arguments.index("-m") + 1]]


def _without_traceback(record: logging.LogRecord) -> bool:
    record.exc_info = None
    return True


def _watch(options: argparse.Namespace) -> Watch:
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
        signal_all(children(os.getpid()), signal.Signals(number))


def _forward_to_forks(number: int, _: FrameType | None) -> None:
    with suppress(Exception):
        signal_all(forked_ranks.forked(os.getpid()), signal.Signals(number))


if __name__ == "__main__":
    sys.exit(main())
