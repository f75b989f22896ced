"""Starts the commands of container_commands.py around a container's stages, with the interpreter of the stages."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from typing import Iterator

from hyperpod_ft.errors import UserError, last_line
from hyperpod_ft.sagemaker.container.host import ContainerHost

# Stages that write for long: what they have finished is pushed while they continue.
_LONG = ("precompile", "train", "consolidate", "merge")


class ContainerCommands:
    """What a container does before and after its stages: pull, push, ask for records, create the next job.

    Without a store, nothing is transferred: every host sees the file system.
    """

    def __init__(self, host: ContainerHost, python: str) -> None:
        self._host, self._python = host, python
        self._store = host.parameters.store

    def pull_run(self) -> None:
        if self._store:
            self._call("pull-run", self._host.parameters.root, self._store, self._host.parameters.run_files)

    def refuse_cancelled(self) -> None:
        """Raise UserError when the job was cancelled: the container that created it may not stop it."""
        self._call("refuse-cancelled", self._host.parameters.job)

    def before(self, stage: str, checkpoint: int | None = None) -> None:
        """Pull what a stage needs, and the newest checkpoint, or that of this step; 0: none."""
        if self._store:
            self._call("before", stage, *([] if checkpoint is None else [str(checkpoint)]))

    @contextmanager
    def during(self, stage: str) -> Iterator[None]:
        """Push what the stage finishes while the block runs, and after it the rest.

        If that fails, the log says so: `after` pushes what is missing of a stage that is done, and raises.
        """
        if not self._store or stage not in _LONG:
            yield
            return
        command = self._command("during", stage, str(self._host.number), str(len(self._host.hosts)))
        with subprocess.Popen(command, stdin=subprocess.PIPE) as pushing:
            try:
                yield
            finally:
                pushing.communicate()  # which ends its standard input
        if pushing.returncode:
            print(f"{stage}: not all of its outputs are in {self._store}", file=sys.stderr, flush=True)

    def after(self, stage: str) -> None:
        """Push the outputs of a stage that is done, and then its record."""
        if self._store:
            self._call("after", stage)

    def push_state(self) -> None:
        """Push metrics, attempts and exit statuses. If that fails, the log says why; the stage's own error counts."""
        if self._store and os.access(self._python, os.X_OK):  # there may be no interpreter yet
            subprocess.run(self._command("state"), check=False)

    def is_done(self, stage: str) -> bool:
        """Whether the stage's record says that it is done: exit statuses alone do not."""
        return subprocess.run(self._command("is-done", stage), check=False).returncode == 0

    def seconds_used(self) -> float | None:
        """How much of its limit the job has used, earlier containers of it included. None if that cannot be asked."""
        command = self._command("used", self._host.parameters.job)
        asked = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        try:
            # an image's Python may print something of its own first
            return float(last_line(asked.stdout))
        except ValueError:
            print("the job's time limit counts from this container's start", file=sys.stderr, flush=True)
            return None

    def advance(self) -> None:
        """Create the run's next training job. If that fails, `watch` of the kit does it."""
        if subprocess.run(self._command("advance", self._host.parameters.job), check=False).returncode:
            print("the next training job was not created; hyperpod-ft watch creates it", file=sys.stderr, flush=True)

    def _call(self, *arguments: str) -> None:
        done = subprocess.run(self._command(*arguments), stderr=subprocess.PIPE, text=True, check=False)
        print(done.stderr, end="", file=sys.stderr, flush=True)
        if done.returncode:
            raise UserError(last_line(done.stderr) or f"{' '.join(arguments)}: exit status {done.returncode}")

    def _command(self, action: str, *arguments: str) -> list[str]:
        module = "hyperpod_ft.sagemaker.container_commands"
        return [self._python, "-m", module, action, str(self._host.run_directory), *arguments]
