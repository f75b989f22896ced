"""Services of the node: asking systemd, and making it so."""

from __future__ import annotations

from typing import Sequence

from provision.files import sync_directory
from provision.node import Node

_UNITS = "/etc/systemd/system"
_NULL = "/dev/null"


def show(node: Node, unit: str, what: str) -> str:
    """A property of a unit, as `systemctl show` gives it."""
    return node.run("systemctl", "show", "--property", what, "--value", unit, check=False).stdout.strip()


def main_process(node: Node, unit: str) -> list[str]:
    """The command line of the process that a service runs; [] when it does not run."""
    pid = show(node, unit, "MainPID")
    if pid in ("", "0") or show(node, unit, "ActiveState") != "active":
        return []
    try:
        command = node.path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [word.decode(errors="replace") for word in command.split(b"\0")[:-1]]


def not_kept_running(node: Node, unit: str) -> list[str]:
    """What a service lacks to run now and after each boot, a line each."""
    found = []
    if show(node, unit, "LoadState") != "loaded":
        return [f"no {unit}.service"]
    if show(node, unit, "UnitFileState") != "enabled":
        found.append(f"{unit} is not enabled")
    if show(node, unit, "ActiveState") != "active":
        found.append(f"{unit} does not run")
    return found


def stale(node: Node, unit: str) -> list[str]:
    """One line when a file of the service was written after systemd read it."""
    return [f"systemd has not read {unit}.service anew"] if show(node, unit, "NeedDaemonReload") == "yes" else []


def keep_running(node: Node, unit: str) -> None:
    """Start a service, now and at each boot, with its unit file as it is. `not_kept_running` says whether it runs then.

    A service that tells systemd when it is ready, and cannot be before another machine answers, fails to start first.
    """
    node.run("systemctl", "daemon-reload")
    # Failures of a run before this one must not count towards the limit of starts.
    node.run("systemctl", "reset-failed", unit, check=False)
    node.run("systemctl", "enable", unit)
    started = node.run("systemctl", "start", unit, check=False)
    if started.returncode != 0:
        node.say(f"{unit} does not start yet: {' '.join(started.stderr.split())}")


def not_masked(node: Node, unit: str) -> list[str]:
    """One line when somebody could start the service."""
    return [] if show(node, unit, "LoadState") == "masked" else [f"{unit} is not masked"]


def mask(node: Node, unit: str) -> None:
    """Nobody can start the service any more; if it runs, it goes on.

    `systemctl mask` refuses where the unit lies in /etc, as on HyperPod's AMI: that one gets out of the way, under the
    name that AWS's own scripts give it.
    """
    units = node.path(_UNITS)
    file = units / f"{unit}.service"
    if file.exists() and not file.is_symlink():
        file.replace(units / f"{unit}_DO_NOT_START_ON_CONTROLLER.service")
        sync_directory(units)
    node.run("systemctl", "mask", unit)
    node.run("systemctl", "daemon-reload")


def journal(node: Node, unit: str, only: Sequence[str] = ("error", "fatal")) -> str:
    """The last line that a service wrote with one of these words, for an error message; "" without any."""
    said = node.run("journalctl", "--unit", unit, "--lines", "50", "--output", "cat", "--no-pager", check=False).stdout
    told = [line.strip() for line in said.splitlines() if any(word in line.lower() for word in only)]
    return told[-1] if told else ""
