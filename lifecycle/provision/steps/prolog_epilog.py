"""Slurm's prolog and epilog, run as root around each job: `slurm/prolog.sh` and `slurm/epilog.sh` of these scripts.

slurmctld checks them when it starts and slurmd runs them, so every node has them. slurm.conf names them with
`Prolog=` and `Epilog=`.
"""

from __future__ import annotations

from typing import Sequence

from provision.files import File, FilesStep
from provision.node import Node

FOLDER = "/opt/slurm/etc/scripts"


class PrologEpilog(FilesStep):
    name = "prolog_epilog"

    def files(self, node: Node) -> Sequence[File]:
        # These scripts are in /tmp, which is lost at a reboot.
        return [
            File(f"{FOLDER}/{name}", (node.scripts / "slurm" / name).read_text(), 0o755)
            for name in ("prolog.sh", "epilog.sh")
        ]
