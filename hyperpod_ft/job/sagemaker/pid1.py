"""PID 1 of a container: run one function in a child, forward SIGTERM to it, and reap every orphaned process.

The kernel gives PID 1 every orphan of the container, and delivers to it only the signals that it handles.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from typing import Callable

_FORWARDED = (signal.SIGTERM, signal.SIGINT)


def run_as_child(work: Callable[[], int]) -> int:
    """Run `work` in a child; returns its exit status, 128 + N for signal N. Other processes end with the container."""
    # blocked until the handlers are there: the first signal must not be lost
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        status = 1
        try:
            status = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    for number in _FORWARDED:
        signal.signal(number, lambda received, _: os.kill(child, received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    while True:
        pid, ended = os.wait()
        if pid == child:
            return os.WEXITSTATUS(ended) if os.WIFEXITED(ended) else 128 + os.WTERMSIG(ended)
