"""The findings of a head node and the nodes behind it, and findings as a text for a bug report, without secrets."""

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

from hyperpod_ft import __version__
from hyperpod_ft.config import yaml_text
from hyperpod_ft.config.secrets import without_secrets
from hyperpod_ft.doctor import machine, slurm, software, volume
from hyperpod_ft.doctor.check import DoctorCheck, Expectations, described, run_checks
from hyperpod_ft.doctor.every_node import every_node
from hyperpod_ft.findings import Finding
from hyperpod_ft.runs.records import utc_now

_ACCOUNT = re.compile(r"\b\d{12}\b")


def text(rows: Sequence[Finding], expected: Expectations | None = None) -> str:
    """The report. `expected` None: of a cluster from outside."""
    lines = [f"hyperpod-ft {__version__} doctor, {utc_now()}", f"{_system()}, Python {platform.python_version()}", ""]
    lines += [f"{row.name}: {described(row)}" for row in rows]
    if expected and expected.config:
        lines += ["", "cluster:", yaml_text.dump(expected.config.cluster), "env:", yaml_text.dump(expected.config.env)]
    return _ACCOUNT.sub("<account>", without_secrets("\n".join(lines).rstrip() + "\n", os.environ))


def _system() -> str:
    release = Path("/etc/os-release")
    names = (
        dict(line.split("=", 1) for line in release.read_text().splitlines() if "=" in line) if release.exists() else {}
    )
    return f"{names.get('PRETTY_NAME', platform.system()).strip(chr(34))}, Linux {platform.release()}"


def checks(expected: Expectations) -> list[DoctorCheck]:
    """About this machine, and about Slurm as it shows it."""
    modules = (software, volume, machine, slurm)
    return [check for module in modules for check in module.checks(expected)]


def inside(expected: Expectations, nodes: bool) -> list[Finding]:
    """What this machine shows; with `nodes` also what a small job on each of Slurm's nodes does."""
    on_nodes = [DoctorCheck("every node", lambda: every_node(expected))] if nodes else []
    return run_checks([*checks(expected), *on_nodes])
