"""Programs: those that stand in for others, and the kit's own command."""

import os
import subprocess
import sys
from pathlib import Path


def write_program(path: Path, text: str) -> None:
    """Write a shell script: `text` after its #! line, unless it has one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def call(*arguments: object, cwd: Path | None = None, **environment: str) -> "subprocess.CompletedProcess[str]":
    """`hyperpod-ft` as a user runs it, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "hyperpod_ft", *map(str, arguments)],
        cwd=cwd,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
