"""The node, for steps: paths below its root, commands, settings, identity, log."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping

from provision.errors import PassingError
from provision.identity import RECORD, Identity, ask_instance_id, identify, read_identity
from provision.journal import Journal
from provision.settings import Settings

# Where HyperPod's AMIs have programs that are not on everybody's PATH.
_PROGRAMS = ("/opt/slurm/bin", "/opt/slurm/sbin", "/opt/aws/neuron/bin")


@dataclass(frozen=True)
class Node:
    """The node that steps act on. Created once per run and immutable."""

    root: Path
    settings: Settings
    journal: Journal
    scripts: Path
    """The folder that HyperPod downloaded: provision.sh, settings.json and this package."""

    @property
    def live(self) -> bool:
        """Whether this is the running machine, and not files of another one below `--root`."""
        return self.root == Path("/")

    @property
    def identity(self) -> Identity:
        """This node's identity, as step `identify` recorded; determined again if it has not (a dry run on a new node).

        Raises NodeError if it cannot be determined.
        """
        if self.path(RECORD).exists():
            return read_identity(self.path)
        return identify(ask_instance_id(), self.path, self.settings.groups)

    def path(self, absolute: str) -> Path:
        """`/etc/hosts` of this node."""
        return self.root / absolute.lstrip("/")

    @property
    def fsx(self) -> Path:
        """Where the shared file system is mounted."""
        return self.path(self.settings.fsx.mount_path)

    def run(
        self, *command: str, stdin: str = "", check: bool = True, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of this node, found on the PATH of a root login, with stdout and stderr captured as text.

        Raises PassingError if the command is missing or, with `check`, if it fails, with the last line of its output.
        It has no separate time limit: the step's deadline kills it.
        """
        argv = command if self.live else ("chroot", str(self.root), *command)
        path = ":".join((*_PROGRAMS, os.environ.get("PATH", ""), "/usr/sbin", "/usr/bin", "/sbin", "/bin"))
        # LC_ALL: the output of commands is parsed.
        settled = {"PATH": path, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive", **(environment or {})}
        try:
            done = subprocess.run(
                argv,
                input=stdin,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                env={**os.environ, **settled},
            )
        except FileNotFoundError:
            raise PassingError(f"command {argv[0]} not found on this node", "use HyperPod's AMI") from None
        if check and done.returncode != 0:
            lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            raise PassingError(
                f"{' '.join(command)}: exit status {done.returncode}: {lines[-1] if lines else 'no error message'}"
            )
        return done

    def say(self, text: str) -> None:
        """Write a line of the running step to the log."""
        self.journal.write("note", text)
