"""Ranks that torchrun forks from a process that has already imported what they need, which takes each rank seconds.

That process is the fork server of Python's `multiprocessing`. It has one thread and no device: it only imports, and a
package that asks for a GPU at its import gets the answer from the driver's library, without a context. It ignores what
asks ranks to stop, and dies with torchrun; ranks die with it.
"""

import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util

from hyperpod_ft import heartbeat
from hyperpod_ft.processes import children, die_with_parent, name_process
from hyperpod_ft.runs.job_files import STOP_SIGNALS

# Without the thread that pyarrow's allocator starts at its import; and see above.
_SERVER_VARIABLES = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

# A rank that ends with an exception may only have noticed that another is gone: torchrun, which looks ten times a
# second, sees that one first.
_ECHO_STATUS, _ECHO_SECONDS = 1, 0.2


def start_server(modules: Sequence[str]) -> None:
    """Start the server, unless it runs. It imports the modules while this process does something else."""
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
