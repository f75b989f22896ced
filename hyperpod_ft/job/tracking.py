"""Publishes a training run to its trackers while it runs: a process (tracking/follower.py) on the first node."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

from hyperpod_ft.processes import signal_all, tree
from hyperpod_ft.runs.job_files import PYTHON
from hyperpod_ft.runs.run import Run

_LAST_SECONDS = 35  # a little more than it gives itself


@contextlib.contextmanager
def publishing_metrics(run: Run) -> Iterator[None]:
    """While the block runs, the run's metrics are published, and what is missing a last time afterwards.

    The process ends when this one dies: its standard input then ends. It never fails the block. Containers of training
    jobs have no keys and no environments of trackers: `hyperpod-ft track` publishes what they leave.
    """
    if not run.config.tracking.trackers or PYTHON in os.environ:
        yield
        return
    process = None
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "hyperpod_ft.tracking.follower", str(run.paths.directory)], stdin=subprocess.PIPE
        )
    except OSError as error:
        print(
            f"tracking: cannot start: {error.strerror}; hyperpod-ft track {run.paths.directory} catches up", flush=True
        )
    try:
        yield
    finally:
        if process is not None:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(_LAST_SECONDS)
    except subprocess.TimeoutExpired:
        signal_all(tree(process.pid), signal.SIGKILL)
        process.wait()
