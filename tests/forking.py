"""Processes that are forked from one that has imported what they need, which takes each of them up to seconds.

    python -m tests.forking DESCRIPTOR MODULE

imports the module and serves the pytest process behind a connection: for each (arguments, directory, environment,
output) that it receives it forks `python -m ARGUMENTS...` and sends (pid, None), and when that has ended (pid, status
as in subprocess.Popen.returncode). It ends with the connection.
"""

import importlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from hyperpod_ft import gc_pause


def fork_module(arguments: Sequence[str], prepare: Callable[[], object]) -> int:
    """The pid of a fork that calls `prepare` and then does what `python -m ARGUMENTS...` would, but for its exit."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        prepare()
        sys.argv = list(arguments)
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class ForkServer:
    """The process that forks, seen from pytest."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        """`module`: what the processes import, directly or not."""
        self.connection, other = Pipe()
        self.statuses: dict[int, int] = {}
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.forking", str(other.fileno()), module],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
            )

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], output: Path, directory: Path | None = None
    ) -> "Forked":
        """`directory`: where it runs; without one, this process's."""
        self.connection.send((list(arguments), str(directory or Path.cwd()), dict(environment), str(output)))
        while (pid := self.receive()) is None:
            pass
        return Forked(pid, self)

    def receive(self) -> int | None:
        """Note the next process that ended; the pid if it was one that started instead."""
        pid, status = self.connection.recv()
        if status is None:
            self.statuses.pop(pid, None)
            return int(pid)
        self.statuses[pid] = status
        return None

    def close(self) -> None:
        self.connection.close()
        self.process.wait(30)


class Forked:
    """What the tests use of subprocess.Popen, for a process that is not this one's child."""

    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid, self.server = pid, server

    def poll(self) -> int | None:
        while self.server.connection.poll():
            self.server.receive()
        return self.server.statuses.get(self.pid)

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if not self.server.connection.poll(max(0.0, deadline - time.monotonic())):
                raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout)
        return status


def serve(connection: Connection) -> None:
    with suppress(EOFError):
        while True:
            if connection.poll(0.01):
                arguments, directory, environment, output = connection.recv()
                descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

                def become_the_program(
                    directory: str = directory,
                    environment: dict[str, str] = environment,
                    descriptor: int = descriptor,
                ) -> None:
                    connection.close()
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    os.chdir(directory)
                    os.environ.clear()
                    os.environ.update(environment)
                    tempfile.tempdir = None  # read from the environment again
                    for stream in (sys.stdout, sys.stderr):
                        os.dup2(descriptor, stream.fileno())
                    os.close(descriptor)

                pid = fork_module(arguments, become_the_program)
                os.close(descriptor)
                connection.send((pid, None))
            with suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    connection.send((ended[0], os.waitstatus_to_exitcode(ended[1])))


if __name__ == "__main__":
    gc_pause.pause_collection()
    importlib.import_module(sys.argv[2])
    gc_pause.resume_collection()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then ends the jobs
    serve(Connection(int(sys.argv[1])))
    os._exit(0)  # Python's own exit takes seconds after these imports
