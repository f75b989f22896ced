"""slurmctld's state, parsed from the text of `scontrol` (its JSON differs between versions)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from provision.node import Node

# Without slurmctld, scontrol would retry for minutes.
_SCONTROL = ("timeout", "30", "scontrol")
_USABLE = {"IDLE", "ALLOCATED", "MIXED", "COMPLETING"}
# Set by HyperPod, an operator or an earlier fault; a new machine under the same name keeps it.
_SET_ASIDE = {"DRAIN", "DRAINING", "DRAINED", "FAIL", "FAILING", "MAINT", "RESERVED"}
_AWAY = {"NOT_RESPONDING", "UNKNOWN", "POWERED_DOWN", "POWERING_DOWN", "INVAL", "INVALID_REG", "FUTURE"}
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
        """Why no job can run there; "" if jobs can, or if the node was set aside.

        A drained node is not a problem of the machine: a new one inherits the state from its predecessor. A fault that
        slurmctld finds in this machine itself is INVALID_REG.
        """
        if self.states & _AWAY or (not self.states & _USABLE and not self.set_aside):
            reason = f": {self.reason}" if self.reason else ""
            return f"slurmctld reports {self.name} as {'+'.join(sorted(self.states))}{reason}"
        return ""

    @property
    def set_aside(self) -> str:
        """Why no job runs there although the machine works; "" if jobs do."""
        by_somebody = "DOWN" in self.states and self.reason and "[slurm@" not in self.reason
        aside = by_somebody or self.states & _SET_ASIDE
        return f"{'+'.join(sorted(self.states))}: {self.reason}" if aside else ""


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


def answers(node: Node) -> bool:
    """Whether a slurmctld answers."""
    done = node.run(*_SCONTROL, "ping", check=False)
    return " UP" in done.stdout


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
