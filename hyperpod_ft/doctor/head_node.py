"""The findings of a head node, and of the nodes behind it."""

from hyperpod_ft.doctor import machine, slurm, software, volume
from hyperpod_ft.doctor.assumption import Assumption, examine
from hyperpod_ft.doctor.every_node import every_node
from hyperpod_ft.doctor.expectations import Expectations
from hyperpod_ft.findings import Finding


def assumptions(expected: Expectations) -> list[Assumption]:
    """About this machine, and about Slurm as it shows it."""
    modules = (software, volume, machine, slurm)
    return [assumption for module in modules for assumption in module.assumptions(expected)]


def inside(expected: Expectations, nodes: bool) -> list[Finding]:
    """What this machine shows; with `nodes` also what a small job on each of Slurm's nodes does."""
    on_nodes = [Assumption("every node", lambda: every_node(expected))] if nodes else []
    return examine([*assumptions(expected), *on_nodes])
