"""The head node of the tests: the command of a user, and what Slurm says."""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.aws.kit import Started, start
from tests.waiting import wait_for


@dataclass
class Head:
    """The head node of a user: a working directory, an environment, and the command."""

    directory: Path
    environment: dict[str, str] = field(default_factory=dict)

    def write(self, content: dict[str, Any], name: str = "run.yaml") -> str:
        (self.directory / name).write_text(yaml.safe_dump(content), encoding="utf-8")
        return name

    def start(self, *arguments: str) -> Started:
        return start(self.directory, os.environ | self.environment, *arguments)

    def __call__(self, *arguments: str, status: int = 0) -> str:
        return self.start(*arguments).finish(status)

    def status(self, *run: str, exit_status: int = 0) -> dict[str, Any]:
        """Of the run that was submitted last, or of the given one."""
        found: dict[str, Any] = json.loads(self("status", *run, "--json", status=exit_status))
        return found

    def slurm(self, *arguments: str) -> str:
        return subprocess.run(
            arguments,
            env=os.environ | self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        ).stdout

    def wait(self, condition: Callable[[], object], seconds: float = 300, every: float = 0.5) -> None:
        wait_for(condition, seconds, lambda: self.start("status").communicate()[0], every=every)

    def wait_for_the_queue(self, seconds: float = 300, every: float = 0.5) -> None:
        """Until Slurm has no job left."""
        self.wait(lambda: not self.slurm("squeue", "--noheader"), seconds, every)
