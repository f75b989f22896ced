"""The diagnoses of a head node, and of the nodes behind it."""

from hyperpod_ft.doctor import machine, slurm, software, volume
from hyperpod_ft.doctor.assumed import Assumed
from hyperpod_ft.doctor.diagnosis import Assumption, Diagnosis, examine
from hyperpod_ft.doctor.every_node import every_node


def assumptions(assumed: Assumed) -> list[Assumption]:
    """About this machine, and about Slurm as it shows it."""
    modules = (software, volume, machine, slurm)
    return [assumption for module in modules for assumption in module.assumptions(assumed)]


def inside(assumed: Assumed, nodes: bool) -> list[Diagnosis]:
    """What this machine shows; with `nodes` also what a small job on each of Slurm's nodes does."""
    on_nodes = [Assumption("every node", lambda: every_node(assumed))] if nodes else []
    return examine([*assumptions(assumed), *on_nodes])
