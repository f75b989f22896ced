"""Ranks that torchrun forks from a process that has already imported what they need, which takes each rank seconds.

That process is the fork server of Python's `multiprocessing`. It has one thread and no device: it only imports, and a
package that asks for a GPU at its import gets the answer from the driver's library, without a context. It ignores what
asks ranks to stop, and dies with torchrun; ranks die with it.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, forkserver, resource_tracker, util
from multiprocessing.context import get_spawning_popen
from typing import Any

from hyperpod_ft import heartbeat
from hyperpod_ft.processes import children, die_with_parent, name_process
from hyperpod_ft.runs.job_files import NOTICE, STOP_SIGNALS, shell_status

# Without the thread that pyarrow's allocator starts at its import; and see above.
_SERVER_VARIABLES = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

# A rank that ends with an exception may only have noticed that another is gone: torchrun, which looks ten times a
# second, sees that one first.
_ECHO_STATUS, _ECHO_SECONDS = 1, 0.2
_LOOK_SECONDS = 0.1

# The path of the server's socket is up to 32 characters longer, and Linux takes 107.
_LONGEST_DIRECTORY = 75


def start_server(modules: Sequence[str]) -> None:
    """Start the server, unless it runs. It imports the modules while this process does something else."""
    if len(tempfile.gettempdir()) > _LONGEST_DIRECTORY:
        tempfile.tempdir = "/tmp"  # noqa: S108 - where multiprocessing makes a directory of its own
    # torch takes as a pickle of a rank's error whatever has that file's name, which other users would see in /tmp
    tempfile.tempdir = util.get_temp_dir()
    multiprocessing.set_forkserver_preload(["hyperpod_ft.job.fork_server", *modules])
    variables = {name: value for name, value in _SERVER_VARIABLES.items() if name not in os.environ}
    # Blocked in the server, and in a rank until it can be stopped: none is lost. The tracker of Python's semaphores,
    # a process too, is started first, because that unblocks SIGTERM.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    os.environ.update(variables)
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        forkserver.ensure_running()
    finally:
        for name in variables:
            del os.environ[name]
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def run_rank(heartbeats: str, module: str, *arguments: str) -> None:
    """In a fork: do what `python -m MODULE ARGUMENTS...` would. Returns only if that succeeds, as torchrun expects.

    `heartbeats`: torchrun's variable `heartbeat.FILES`, which it has changed since the server began.
    """
    # torch has asked for a SIGINT, which a rank that waits for another would not notice
    die_with_parent(os.getppid(), signal.SIGKILL)
    os.setsid()
    name_process(f"rank {os.environ['RANK']}")
    for name, value in _SERVER_VARIABLES.items():
        if os.environ.get(name) == value:
            del os.environ[name]
    os.environ[heartbeat.FILES] = heartbeats
    heartbeat.begin()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    sys.argv = [module, *arguments]
    if status := importlib.import_module(module).run():
        if status == _ECHO_STATUS:
            time.sleep(_ECHO_SECONDS)
        os._exit(status)
    # when torchrun knows of it, in place of Python's own exit: see `run` of stages/train.py
    util.Finalize(None, os._exit, args=(0,), exitpriority=sys.maxsize)


def forked(parent: int) -> list[int]:
    """The ranks that were forked for torchrun, the process `parent`."""
    return [rank for server in children(parent) for rank in children(server)]


class FirstFailure:
    """Says which rank failed first, while torchrun still waits for the others to end: for half a minute, or for ever.

    An argument for `run_rank` in place of the heartbeats: it is pickled, as those, whenever a rank is forked.
    """

    def __init__(self, heartbeats: str, report: Callable[[int, int, float], None]) -> None:
        """`report` gets the local rank, its exit status as a shell gives it, and the moment (Unix time, seconds)."""
        self.status = 0  # of the rank, once it is reported
        self._heartbeats, self._report = heartbeats, report
        self._forks: list[Any] = []  # as multiprocessing sees them, by local rank

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        self._forks.append(get_spawning_popen())
        return str, (self._heartbeats,)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Look for it during the block, until torchrun is signalled, which then ends the ranks itself."""
        signals, writer = os.pipe()
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        over = threading.Event()
        thread = threading.Thread(target=self._look, args=(signals, over), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            signal.set_wakeup_fd(before)
            thread.join()
            os.close(signals)
            os.close(writer)

    def _look(self, signals: int, over: threading.Event) -> None:
        ended: dict[int, float] = {}  # when, by local rank: the first one first
        last = False
        while not last:
            last = over.is_set()
            # before a fork has its number, what can be read is that
            running = {
                fork.sentinel: rank
                for rank, fork in enumerate(self._forks)
                if rank not in ended and hasattr(fork, "pid")
            }
            ready = connection.wait([signals, *running], 0 if last else _LOOK_SECONDS)
            if signals in ready and set(os.read(signals, 4096)) - {NOTICE}:
                return
            ended |= {rank: time.time() for sentinel, rank in running.items() if sentinel in ready}
            for rank, moment in ended.items():
                status = self._forks[rank].returncode
                if status is None:
                    break  # torchrun alone can ask for it, and looks ten times a second
                if status:
                    self._report(rank, shell_status(status), moment)
                    self.status = shell_status(status)
                    return
