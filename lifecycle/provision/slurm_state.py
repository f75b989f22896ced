"""slurmctld's state, parsed from the text of `scontrol` (its JSON differs between versions)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from provision.node import Node

# Without slurmctld, scontrol would retry for minutes.
_SCONTROL = ("timeout", "30", "scontrol")
_USABLE = {"IDLE", "ALLOCATED", "MIXED", "COMPLETING"}
# With one of these, Slurm starts no job on a usable node.
_NO_JOBS = {"DRAIN", "DRAINING", "DRAINED", "FAIL", "FAILING", "MAINT", "RESERVED", "NOT_RESPONDING", "POWERED_DOWN"}
_NO_JOBS |= {"POWERING_DOWN", "INVAL", "INVALID_REG"}
REBOOTED = "Node unexpectedly rebooted"


@dataclass(frozen=True)
class SlurmNode:
    """A node in slurmctld's view."""

    name: str
    states: frozenset[str]
    """`IDLE*+DRAIN` is IDLE, NOT_RESPONDING and DRAIN."""
    reason: str
    """Why it is down or drained, and who set it; "" if it is neither."""

    @property
    def problem(self) -> str:
        """Why Slurm starts no job there; "" if it does.

        Not necessarily a problem of the machine: a new one inherits a drained state from its predecessor.
        """
        if self.states & _USABLE and not self.states & _NO_JOBS:
            return ""
        reason = f": {self.reason}" if self.reason else ""
        return f"slurmctld reports {self.name} as {'+'.join(sorted(self.states))}{reason}"


def parse_nodes(text: str) -> dict[str, SlurmNode]:
    """`scontrol show node --oneliner` by address."""
    found = {}
    for line in text.splitlines():
        name = re.search(r"NodeName=(\S+)", line)
        address = re.search(r"NodeAddr=(\S+)", line)
        state = re.search(r"\bState=(\S+)", line)
        if not (name and address and state):
            continue
        reason = re.search(r"\bReason=(.*?)(?: (?:Comment|Extra|InstanceId|ResumeAfterTime)=.*)?$", line)
        states = set(re.split(r"[+]", re.sub(r"[*~#!%$@^-]", "", state.group(1))))
        if "*" in state.group(1):
            states.add("NOT_RESPONDING")
        found[address.group(1)] = SlurmNode(name.group(1), frozenset(states), reason.group(1).strip() if reason else "")
    return found


def ask_nodes(node: Node) -> dict[str, SlurmNode]:
    """All nodes known to slurmctld, by address; none if it does not answer."""
    done = node.run(*_SCONTROL, "show", "node", "--oneliner", check=False)
    return parse_nodes(done.stdout) if done.returncode == 0 else {}


def unreachable(node: Node) -> list[str]:
    """One line if no slurmctld answers."""
    done = node.run(*_SCONTROL, "ping", check=False)
    if " UP" in done.stdout:
        return []
    said = (done.stderr + done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
    return [f"no slurmctld answers: {said[-1].strip()}"]


def running_configuration(node: Node) -> dict[str, str]:
    """slurmctld's running configuration (`scontrol show config`), by key; empty if it does not answer."""
    done = node.run(*_SCONTROL, "show", "config", check=False)
    pairs = (line.partition("=") for line in done.stdout.splitlines())
    return {key.strip(): text.strip() for key, separator, text in pairs if separator}


def has_switches(node: Node) -> bool:
    """Whether slurmctld knows any switch."""
    return "SwitchName=" in node.run(*_SCONTROL, "show", "topology", check=False).stdout


def reconfigure(node: Node) -> None:
    """Make all daemons reread the configuration."""
    node.run(*_SCONTROL, "reconfigure")


def resume(node: Node, name: str) -> None:
    """Let jobs run on a node again."""
    node.run(*_SCONTROL, "update", f"nodename={name}", "state=resume")
