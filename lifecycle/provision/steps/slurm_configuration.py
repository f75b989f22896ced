"""slurmctld's configuration before its first start (legacy path, controller).

HyperPod's agent owns slurm.conf and rewrites it when nodes are added or removed. So only one line is added there, if
missing: the include of accounting.conf, a file that is empty on HyperPod's AMI and is ours.
"""

from __future__ import annotations

import time
from typing import Sequence

from provision import slurm_conf
from provision.errors import PassingError
from provision.files import File, difference, read, write
from provision.node import Node
from provision.step import Step

_AGENT_SECONDS = 300.0
_AGENT_LOG = "/var/log/aws/clusters/sagemaker-cluster-agent.log"


class SlurmConfiguration(Step):
    name = "slurm_configuration"
    needs = ("identify", "epilog")
    deadline = 900.0
    attempts = 2

    def needed(self, node: Node) -> bool:
        return node.settings.provisioning == "legacy" and node.identity.role == "controller"

    def missing(self, node: Node) -> Sequence[str]:
        conf = read(node, slurm_conf.SLURM_CONF)
        if not slurm_conf.names_controller(conf, node.identity.controllers):
            return [f"no {slurm_conf.SLURM_CONF} with {' or '.join(node.identity.controllers)}"]
        found = [line for file in _files(node, conf) for line in difference(node, file)]
        if not slurm_conf.includes(conf):
            found.append(f"{slurm_conf.SLURM_CONF} does not include {slurm_conf.INCLUDED}")
        return found

    def do(self, node: Node) -> None:
        conf = _wait_for_agent(node)
        for file in _files(node, conf):
            write(node, file)
        if not slurm_conf.includes(conf):
            text = f"{conf.rstrip()}\ninclude {slurm_conf.INCLUDED}\n"
            write(node, File(slurm_conf.SLURM_CONF, text, node.path(slurm_conf.SLURM_CONF).stat().st_mode & 0o777))


def accounting_host(node: Node) -> str:
    """The host of slurmdbd: the first controller; "" without accounting."""
    return node.identity.controllers[0] if node.settings.accounting and node.identity.controllers else ""


def _files(node: Node, conf: str) -> list[File]:
    files = [File(slurm_conf.INCLUDED_CONF, slurm_conf.included(accounting_host(node)))]
    if text := slurm_conf.topology(conf, read(node, slurm_conf.TOPOLOGY_CONF)):
        files.append(File(slurm_conf.TOPOLOGY_CONF, text))
    return files


def _wait_for_agent(node: Node) -> str:
    end = time.monotonic() + _AGENT_SECONDS
    while True:
        conf = read(node, slurm_conf.SLURM_CONF)
        # Nodes and partitions come last: with them it is complete.
        if slurm_conf.names_controller(conf, node.identity.controllers) and "PartitionName" in conf:
            return conf
        if time.monotonic() >= end:
            raise PassingError(
                f"{slurm_conf.SLURM_CONF}: after {_AGENT_SECONDS:.0f} s it does not have the controllers "
                f"{', '.join(node.identity.controllers) or '(none known)'}",
                f"HyperPod's agent writes it; see {_AGENT_LOG}",
            )
        time.sleep(1)
