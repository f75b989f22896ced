"""What HyperPod clusters add to the kit: their commands. A run needs none of them."""

from collections.abc import Sequence

from hyperpod_ft.annexes import Annex, Commands


class ClusterAnnex(Annex):
    def commands(self) -> Sequence[Commands]:
        from hyperpod_ft.cluster.cli.commands import app

        return [Commands(app, "cluster", "Create, validate, connect to, change and delete a HyperPod cluster.")]


ANNEX = ClusterAnnex()
