"""The cluster's users in Slurm's accounting, registered by a service of the controller: `slurm/register_users.sh`.

A service, because on the API-driven path slurmctld and slurmdbd may start only after these scripts have ended. It is
repeated until slurmctld has accounting and both answer, and once after each boot.
"""

from __future__ import annotations

from typing import Sequence

from provision import systemd
from provision.files import File, difference, write
from provision.node import Node
from provision.slurm_conf import MARK
from provision.step import Step
from provision.steps.home import names
from provision.steps.keep_scripts import FOLDER

_SERVICE = "hyperpod-ft-associations"
_UNIT = """\
{mark}
[Unit]
Description=Registers the users of the cluster in Slurm's accounting
After=slurmctld.service slurmdbd.service
StartLimitIntervalSec=0

[Service]
ExecStart={folder}/slurm/register_users.sh {users}
RemainAfterExit=yes
Restart=on-failure
RestartSec=5

[Install]
WantedBy=multi-user.target
"""


class Associations(Step):
    name = "associations"
    needs = ("keep_scripts", "users", "accounting")

    def needed(self, node: Node) -> bool:
        wanted = node.settings.provisioning == "api" or node.settings.accounting
        return wanted and node.live and node.identity.role == "controller"

    def missing(self, node: Node) -> Sequence[str]:
        found = [*difference(node, _unit(node)), *systemd.stale(node, _SERVICE)]
        # Between two attempts it is "activating".
        if systemd.show(node, _SERVICE, "ActiveState") in ("inactive", "failed"):
            found.append(f"{_SERVICE} has not been started")
        return found

    def do(self, node: Node) -> None:
        if difference(node, _unit(node)):
            node.run("systemctl", "stop", _SERVICE, check=False)
            write(node, _unit(node))
        systemd.keep_running(node, _SERVICE)


def _unit(node: Node) -> File:
    text = _UNIT.format(mark=MARK, folder=FOLDER, users=" ".join(names(node)))
    return File(f"/etc/systemd/system/{_SERVICE}.service", text)
