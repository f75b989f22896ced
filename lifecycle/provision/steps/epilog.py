"""Slurm's epilog, run as root on a node after each job: `slurm/epilog.sh` of these scripts.

In the folder that HyperPod's AMI has for epilogs of several owners; those of AWS are numbered 700. On the API-driven
path HyperPod's slurm.conf names the folder (step `slurm` reports if it does not), on the legacy path accounting.conf.
"""

from __future__ import annotations

from typing import Sequence

from provision.files import File, FilesStep
from provision.node import Node
from provision.slurm_conf import EPILOG


class Epilog(FilesStep):
    name = "epilog"

    def files(self, node: Node) -> Sequence[File]:
        # These scripts are in /tmp, which is lost at a reboot.
        return [File(EPILOG, (node.scripts / "slurm/epilog.sh").read_text(), 0o755)]
