"""Query and control the node's systemd services."""

from __future__ import annotations

from typing import Sequence

from provision.files import sync_directory
from provision.node import Node

_UNITS = "/etc/systemd/system"


def show(node: Node, unit: str, what: str) -> str:
    """A property of a unit, as `systemctl show` gives it."""
    return node.run("systemctl", "show", "--property", what, "--value", unit, check=False).stdout.strip()


def main_process(node: Node, unit: str) -> list[str]:
    """The command line of a service's main process; [] if it is not running."""
    pid = show(node, unit, "MainPID")
    if pid in ("", "0") or show(node, unit, "ActiveState") != "active":
        return []
    try:
        command = node.path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [word.decode(errors="replace") for word in command.split(b"\0")[:-1]]


def not_kept_running(node: Node, unit: str) -> list[str]:
    """Why a service is not running now or not starting at boot, a line each."""
    found = []
    if show(node, unit, "LoadState") != "loaded":
        return [f"no {unit}.service"]
    if show(node, unit, "UnitFileState") != "enabled":
        found.append(f"{unit} is not enabled")
    if show(node, unit, "ActiveState") != "active":
        found.append(f"{unit} is not running")
    return found


def stale(node: Node, unit: str) -> list[str]:
    """One line if a file of the service was written after systemd read it."""
    return [f"systemd has not reloaded {unit}.service"] if show(node, unit, "NeedDaemonReload") == "yes" else []


def keep_running(node: Node, unit: str) -> None:
    """Start a service, now and at each boot. `not_kept_running` then says whether it runs.

    A service that reports readiness to systemd, but must first reach another machine, may fail to start at first.
    """
    node.run("systemctl", "daemon-reload")
    # Failures of an earlier run must not count towards the start limit.
    node.run("systemctl", "reset-failed", unit, check=False)
    node.run("systemctl", "enable", unit)
    started = node.run("systemctl", "start", unit, check=False)
    if started.returncode != 0:
        node.say(f"{unit} does not start yet: {' '.join(started.stderr.split())}")


def not_masked(node: Node, unit: str) -> list[str]:
    """One line if the service could be started."""
    return [] if show(node, unit, "LoadState") == "masked" else [f"{unit} is not masked"]


def mask(node: Node, unit: str) -> None:
    """Prevent the service from being started; if it is running, it keeps running.

    `systemctl mask` refuses if the unit is in /etc, as on HyperPod's AMI: that one is renamed, as AWS's own scripts do.
    """
    units = node.path(_UNITS)
    file = units / f"{unit}.service"
    if file.exists() and not file.is_symlink():
        file.replace(units / f"{unit}_DO_NOT_START_ON_CONTROLLER.service")
        sync_directory(units)
    node.run("systemctl", "mask", unit)
    node.run("systemctl", "daemon-reload")


def journal(node: Node, unit: str, only: Sequence[str] = ("error", "fatal")) -> str:
    """The last log line of a service with one of these words, for an error message; "" if there is none."""
    said = node.run("journalctl", "--unit", unit, "--lines", "50", "--output", "cat", "--no-pager", check=False).stdout
    matching = [line.strip() for line in said.splitlines() if any(word in line.lower() for word in only)]
    return matching[-1] if matching else ""
