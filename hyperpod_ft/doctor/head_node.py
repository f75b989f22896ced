"""The findings of a head node, and of the nodes behind it."""

from hyperpod_ft.doctor import machine, slurm, software, volume
from hyperpod_ft.doctor.check import DoctorCheck, run_checks
from hyperpod_ft.doctor.every_node import every_node
from hyperpod_ft.doctor.expectations import Expectations
from hyperpod_ft.findings import Finding


def checks(expected: Expectations) -> list[DoctorCheck]:
    """About this machine, and about Slurm as it shows it."""
    modules = (software, volume, machine, slurm)
    return [check for module in modules for check in module.checks(expected)]


def inside(expected: Expectations, nodes: bool) -> list[Finding]:
    """What this machine shows; with `nodes` also what a small job on each of Slurm's nodes does."""
    on_nodes = [DoctorCheck("every node", lambda: every_node(expected))] if nodes else []
    return run_checks([*checks(expected), *on_nodes])
