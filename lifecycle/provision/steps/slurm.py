"""Report whether Slurm runs jobs on this node. Nothing that Slurm says fails a node.

On the API-driven path HyperPod starts Slurm before these scripts, at the same time, or after them: AWS's samples
disagree (Extensions/detect-node and Extensions/add-users of awslabs/awsome-distributed-ai). Until slurmd has started, a
node other than the controller has no slurm.conf, so scontrol fails; slurmctld may know the node only minutes later, or
as the machine that it replaces. A failed script would have HyperPod replace a good node, again and again.
"""

from __future__ import annotations

import os
import re
import time
from fnmatch import fnmatch
from typing import Sequence

from provision import slurm_conf, slurm_state
from provision.files import read
from provision.node import Node
from provision.step import Step


class Slurm(Step):
    name = "slurm"
    needs = ("identify", "slurm_daemons")
    advisory = True
    attempts = 1

    def needed(self, node: Node) -> bool:
        return node.live

    def missing(self, node: Node) -> Sequence[str]:
        found: list[str] = []
        if node.identity.role == "controller":
            paths = (slurm_conf.SLURM_CONF, slurm_conf.TOPOLOGY_CONF, slurm_conf.TOPOLOGY_YAML)
            conf, topology_conf, topology_yaml = (read(node, path) for path in paths)
            there = node.path(slurm_conf.TOPOLOGY_YAML).exists()  # an empty one counts
            found = slurm_conf.topology_faults(conf, topology_conf, topology_yaml if there else None)
        if unreachable := slurm_state.unreachable(node):
            return [*found, *unreachable]
        if node.identity.role == "controller":
            return [*found, *_epilog_not_run(node)]
        return _without_jobs(node) if node.identity.role == "compute" else []

    def do(self, node: Node) -> None:
        """Wait up to PROVISION_SLURM_SECONDS (60) for Slurm."""
        end = time.monotonic() + float(os.environ.get("PROVISION_SLURM_SECONDS", "60"))
        while self.missing(node):
            if node.settings.provisioning == "legacy" and node.identity.role == "compute":
                _resume_if_rebooted(node)
            if time.monotonic() >= end:
                return
            time.sleep(0.5)


def _epilog_not_run(node: Node) -> list[str]:
    running = slurm_state.running_configuration(node)
    # Newer versions of Slurm number them: Epilog[0].
    epilogs = [text for key, text in running.items() if re.fullmatch(r"Epilog(\[\d+\])?", key)]
    if any(fnmatch(slurm_conf.EPILOG, pattern) for pattern in epilogs):
        return []
    return [f"Slurm does not run {slurm_conf.EPILOG}, so what jobs leave behind keeps running"]


def _without_jobs(node: Node) -> list[str]:
    address = node.identity.address
    known = slurm_state.ask_nodes(node).get(address)
    if known is None:
        return [f"slurmctld knows no node with address {address} yet; HyperPod's agent adds it to slurm.conf"]
    return [known.problem] if known.problem else []


def _resume_if_rebooted(node: Node) -> None:
    """slurmctld treats a replaced node as rebooted and keeps it down until it is resumed."""
    known = slurm_state.ask_nodes(node).get(node.identity.address)
    if known and "DOWN" in known.states and known.reason.startswith(slurm_state.REBOOTED):
        node.say(f"{known.problem}; resuming it")
        slurm_state.resume(node, known.name)
