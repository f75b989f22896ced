"""Programs: those that stand in for others, and the kit's own command."""

import functools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.forking import Forked, ForkServer

_ROOT = Path(__file__).resolve().parents[1]


def write_program(path: Path, text: str) -> None:
    """Write a shell script: `text` after its #! line, unless it has one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@functools.cache
def commands(modules: str = "tests.aws.command_modules") -> ForkServer:
    """Forks `hyperpod-ft` for this process, and ends with it; `modules`: the module that imports what they need."""
    # clients are made there, of no account of the user's
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return ForkServer([modules], environment | {"PYTHONPATH": str(_ROOT)})


class Started:
    """A command, with what tests use of subprocess.Popen; its standard output has its standard error too."""

    def __init__(self, process: Forked, output: int) -> None:
        self._process = process
        self.stdout = os.fdopen(output)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float) -> int:
        return self._process.wait(timeout)

    def communicate(self, timeout: float = 300) -> tuple[str, None]:
        """All that it still prints, and then its end, for which `timeout` counts."""
        with self.stdout:
            printed = self.stdout.read()
        self._process.wait(timeout)
        return printed, None

    def finish(self, status: int = 0, timeout: float = 300) -> str:
        """All that it still prints, once it has ended with this status, and with no traceback."""
        output, _ = self.communicate(timeout)
        assert self.returncode == status, output
        assert "Traceback" not in output
        return output

    def wait_for(self, text: str) -> None:
        """Until it prints a line with this text."""
        assert any(text in line for line in self.stdout), f"it ended without {text!r}"

    def kill_at(self, text: str) -> None:
        """SIGKILL as soon as it prints this."""
        self.wait_for(text)
        self.kill()
        self.communicate()

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):  # it may have ended meanwhile
                os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_module(directory: Path, environment: Mapping[str, str], *arguments: str) -> Started:
    """Start what `python -m ARGUMENTS...` would, or `python -c PROGRAM ARGUMENTS...`, in a directory."""
    reading, writing = os.pipe()
    try:
        output = Path(f"/proc/{os.getpid()}/fd/{writing}")
        process = commands().start(arguments, environment, output, directory)
    finally:
        os.close(writing)
    return Started(process, reading)


def call(*arguments: object, cwd: Path | None = None, **environment: str) -> "subprocess.CompletedProcess[str]":
    """`hyperpod-ft` as a user runs it, in a process of its own; forked, unless another PYTHONPATH is given."""
    command = ["hyperpod_ft", *map(str, arguments)]
    if "PYTHONPATH" in environment:
        given: dict[str, Any] = {"cwd": cwd, "env": os.environ | environment, "stdin": subprocess.DEVNULL}
        real = [sys.executable, "-m", *command]
        return subprocess.run(real, **given, capture_output=True, text=True, timeout=300, check=False)
    with tempfile.TemporaryDirectory() as name:
        output, errors = Path(name, "output"), Path(name, "errors")
        server = commands("tests.unit.cli.data_modules") if arguments[0] == "data" else commands()
        status = server.start(command, os.environ | environment, output, cwd, errors).wait(300)
        return subprocess.CompletedProcess(command, status, output.read_text(), errors.read_text())
