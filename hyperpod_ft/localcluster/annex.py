"""What the local cluster adds to the kit: its commands, and the Slurm that runs on this machine may use."""

from collections.abc import Sequence
from pathlib import Path

from hyperpod_ft.annexes import Annex, Commands


class LocalClusterAnnex(Annex):
    def commands(self) -> Sequence[Commands]:
        from hyperpod_ft.localcluster.cli import app

        return [Commands(app, "local", "A real Slurm on this machine.")]

    def slurm_conf(self, cluster: str) -> Path | None:
        from hyperpod_ft.localcluster import LocalCluster, default_directory, running_conf

        return running_conf(cluster or LocalCluster(default_directory()).name)

    def slurm_name(self, conf: str) -> str:
        from hyperpod_ft.localcluster import name_of

        return name_of(conf)


ANNEX = LocalClusterAnnex()
