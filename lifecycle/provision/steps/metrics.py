"""Metrics of the node for Prometheus, from installed programs (optional); downloads nothing.

node_exporter on port 9100; on nodes with Neuron devices neuron-monitor, which AWS's AMI has, on port 8000.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Sequence

from provision import systemd
from provision.files import File, difference, write
from provision.node import Node
from provision.step import Step

_FOLDERS = ("/usr/local/bin", "/usr/bin", "/opt/node_exporter", "/opt/aws/neuron/bin")
_UNIT = """\
# Written whole by hyperpod-ft's lifecycle scripts: changes do not last.
[Unit]
Description={description}
After=network-online.target
StartLimitIntervalSec=0

[Service]
ExecStart={command}
{identity}Restart=always
RestartSec=3

[Install]
WantedBy=multi-user.target
"""


class Metrics(Step):
    name = "metrics"
    needs = ("identify",)

    def needed(self, node: Node) -> bool:
        if not (node.live and node.settings.metrics):
            return False
        for program, remedy in (
            ("node_exporter", "put its binary into /usr/local/bin"),
            ("neuron-monitor", "install aws-neuronx-tools from AWS's Neuron repository"),
        ):
            wanted = program == "node_exporter" or any(node.path("/dev").glob("neuron[0-9]*"))
            if wanted and not _find(node, program):
                node.say(f"no {program} on this node, so its metrics are missing; {remedy} and run provision.sh again")
        return bool(_services(node))

    def missing(self, node: Node) -> Sequence[str]:
        found = []
        for unit, file in _services(node).items():
            found += difference(node, file) or [*systemd.stale(node, unit), *systemd.not_kept_running(node, unit)]
        return found

    def do(self, node: Node) -> None:
        for unit, file in _services(node).items():
            changed = bool(difference(node, file))
            write(node, file)
            systemd.keep_running(node, unit)
            if changed:
                node.run("systemctl", "restart", unit)


def _find(node: Node, program: str) -> str:
    paths = (str(Path(folder) / program) for folder in _FOLDERS)
    return next((path for path in paths if node.path(path).is_file()), "")


def _services(node: Node) -> dict[str, File]:
    """The unit files of the installed programs, by unit."""
    found = {}
    if exporter := _find(node, "node_exporter"):
        found["hyperpod-ft-node-exporter"] = _UNIT.format(
            description="metrics of the machine for Prometheus",
            command=f"{exporter} --web.listen-address=:9100",
            identity="DynamicUser=yes\n",
        )
    monitor, translator = _find(node, "neuron-monitor"), _find(node, "neuron-monitor-prometheus.py")
    if monitor and translator and any(node.path("/dev").glob("neuron[0-9]*")):
        # As AWS documents it: the first writes lines of JSON, the second serves them.
        pipe = f"{shlex.quote(monitor)} | {shlex.quote(translator)} --port 8000"
        found["hyperpod-ft-neuron-monitor"] = _UNIT.format(
            description="metrics of Neuron devices for Prometheus",
            command=f"/bin/bash -o pipefail -c {shlex.quote(pipe)}",
            identity="",
        )
    return {unit: File(f"/etc/systemd/system/{unit}.service", text) for unit, text in found.items()}
