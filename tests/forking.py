"""Processes that are forked from one that has imported what they need, which takes each of them up to seconds.

    python -m tests.forking DESCRIPTOR MODULE...

imports the modules and serves the pytest process behind a connection: for each (arguments, directory, environment,
output, errors) that it receives it forks `python -m ARGUMENTS...` and sends (pid, None), and when that has ended (pid,
status as in subprocess.Popen.returncode). It ends with the connection.
"""

import importlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

from hyperpod_ft import gc_pause


def fork_module(arguments: Sequence[str], prepare: Callable[[], object]) -> int:
    """The pid of a fork that calls `prepare` and then does what `python -m ARGUMENTS...` would, but for its exit.

    Or `python -c PROGRAM ARGUMENTS...`.
    """
    if pid := os.fork():
        return pid
    status = 1
    try:
        prepare()
        if arguments[0] == "-c":
            _, program, *after = arguments
            sys.argv = ["-c", *after]
            exec(program, {"__name__": "__main__"})
        else:
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

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str], python: str = sys.executable) -> None:
        """`modules`: what the processes import, directly or not."""
        self.connection, other = Pipe()
        self.statuses: dict[int, int] = {}
        with other:
            self.process = subprocess.Popen(
                [python, "-m", "tests.forking", str(other.fileno()), *modules],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
            )

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: Path,
        directory: Path | None = None,
        errors: Path | None = None,
    ) -> "Forked":
        """`directory`: where it runs; without one, this process's. `errors`: of its standard error, else `output`."""
        files = str(output), errors and str(errors)
        self.connection.send((list(arguments), str(directory or Path.cwd()), dict(environment), *files))
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
        self.process.wait(300)


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
    running: dict[int, int] = {}  # pids by a descriptor that is ready when the process has ended
    with suppress(EOFError):
        while True:
            for ready in wait([connection, *running]):
                if ready is connection:
                    pid = _start(connection, running)
                    running[os.pidfd_open(pid)] = pid
                    connection.send((pid, None))
                else:
                    pid = running.pop(ready)
                    os.close(ready)
                    connection.send((pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))


def _start(connection: Connection, others: Iterable[int]) -> int:
    """The pid of a fork that runs what the connection says next, without the descriptors of `others`."""
    arguments, directory, environment, output, errors = connection.recv()
    descriptors = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for path in (output, errors) if path]

    def become_the_program() -> None:
        connection.close()
        for other in others:
            os.close(other)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # read from the environment again
        os.dup2(descriptors[0], sys.stdout.fileno())
        os.dup2(descriptors[-1], sys.stderr.fileno())
        for descriptor in descriptors:
            os.close(descriptor)

    pid = fork_module(arguments, become_the_program)
    for descriptor in descriptors:
        os.close(descriptor)
    return pid


if __name__ == "__main__":
    gc_pause.pause_collection()
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc_pause.resume_collection()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then ends the jobs
    serve(Connection(int(sys.argv[1])))
    os._exit(0)  # Python's own exit takes seconds after these imports
