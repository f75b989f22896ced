"""Programs: those that stand in for others, and the kit's own command."""

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.forking import ForkServer

_ROOT = Path(__file__).resolve().parents[1]


def write_program(path: Path, text: str) -> None:
    """Write a shell script: `text` after its #! line, unless it has one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@functools.cache
def commands(modules: str = "tests.aws.command_modules") -> ForkServer:
    """Forks `hyperpod-ft` for this process, and ends with it; `modules`: the module that imports what they need."""
    return ForkServer([modules], os.environ | {"PYTHONPATH": str(_ROOT)})


def call(*arguments: object, cwd: Path | None = None, **environment: str) -> "subprocess.CompletedProcess[str]":
    """`hyperpod-ft` as a user runs it, in a process of its own; forked, unless another PYTHONPATH is given."""
    command = ["hyperpod_ft", *map(str, arguments)]
    if "PYTHONPATH" in environment:
        return subprocess.run(
            [sys.executable, "-m", *command],
            cwd=cwd,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    with tempfile.TemporaryDirectory() as name:
        output, errors = Path(name, "output"), Path(name, "errors")
        server = commands("tests.unit.cli.data_modules") if arguments[0] == "data" else commands()
        status = server.start(command, os.environ | environment, output, cwd, errors).wait(300)
        return subprocess.CompletedProcess(command, status, output.read_text(), errors.read_text())
