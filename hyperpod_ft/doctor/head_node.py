"""The findings of a head node and of the nodes behind it, and findings as a text for a bug report, without secrets."""

import fcntl
import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

from hyperpod_ft import __version__
from hyperpod_ft.config import yaml_text
from hyperpod_ft.config.secrets import without_secrets
from hyperpod_ft.doctor import containers, machine, slurm, software, volume
from hyperpod_ft.doctor.check import DoctorCheck, Expectations, described, run_checks
from hyperpod_ft.doctor.node import NodeFindings, parse_output
from hyperpod_ft.doctor.volume import scratch
from hyperpod_ft.errors import UserError
from hyperpod_ft.findings import Finding, error, ok, warning
from hyperpod_ft.job.health import doubts, problems
from hyperpod_ft.job.job_host import replacement_on_slurm
from hyperpod_ft.launch.slurm.site import SlurmNode
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.shipped import PACKAGE

_ACCOUNT = re.compile(r"\b\d{12}\b")
_PERSON = re.compile(r"(:(?:assumed-role/[^/\s]+|federated-user|user)/)[^\s\"',]+")  # in ARNs; SSO's are mail addresses


def text(rows: Sequence[Finding], expected: Expectations | None = None) -> str:
    """The report. `expected` None: of a cluster from outside."""
    lines = [*heading("doctor"), ""]
    lines += [f"{row.name}: {described(row)}" for row in rows]
    if expected and expected.config:
        lines += ["", "cluster:", yaml_text.dump(expected.config.cluster), "env:", yaml_text.dump(expected.config.env)]
    return shareable("\n".join(lines).rstrip() + "\n")


def heading(command: str) -> list[str]:
    """The first lines of a report: versions, the time, this machine's system."""
    return [f"hyperpod-ft {__version__} {command}, {utc_now()}", f"{_system()}, Python {platform.python_version()}"]


def shareable(text: str) -> str:
    """The text without secrets, numbers and users of AWS accounts, and the path of the home directory."""
    found = _PERSON.sub(r"\1<user>", _ACCOUNT.sub("<account>", without_secrets(text, os.environ)))
    home = str(Path.home())
    return found.replace(home, "~") if len(home) > 1 else found


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


_CLOCK_SECONDS = 60  # munge refuses what is 5 minutes old; tasks of a large job start seconds apart


def every_node(expected: Expectations) -> list[Finding]:
    """A finding for each node, with all that differs there, and those that compare nodes.

    Raises UserError when Slurm does not answer or the volume cannot be written to.
    """
    nodes = {node.name: node for node in reversed(expected.nodes)}  # of several partitions, the first
    free = [node for node in nodes.values() if node.idle]
    by_partition = [
        [*group] for _, group in groupby(sorted(free, key=lambda it: it.partition), lambda it: it.partition)
    ]
    with scratch(expected.writable) as directory, (directory / "probe").open("w") as probe:
        fcntl.flock(probe, fcntl.LOCK_EX)
        with ThreadPoolExecutor() as pool:
            answers = [*pool.map(lambda group: _ask(expected, group, directory / "probe"), by_partition)]
        contained = [
            row
            for group in by_partition
            if expected.container
            for row in containers.on_nodes(expected, group, directory)
        ]
    by_node = {answer.node: answer for found, _ in answers for answer in found}
    silent = {node.name: why for (_, why), group in zip(answers, by_partition, strict=True) for node in group}
    rows = [_node_row(node, by_node.get(node.name), silent.get(node.name, "")) for node in nodes.values()]
    return [
        *sorted(rows, key=lambda row: row.name),
        *contained,
        *_compare_nodes(expected, sorted(by_node.values(), key=lambda it: it.node)),
    ]


def _ask(expected: Expectations, nodes: Sequence[SlurmNode], probe: Path) -> tuple[list[NodeFindings], str]:
    """What these nodes of one partition say, and why others say nothing."""
    config, training = expected.config, nodes[0].partition == expected.training_partition
    instance_type = config.cluster.instance_type if config and training else ""
    count = config.cluster.nodes if config else 1
    command = [sys.executable, "-m", "hyperpod_ft.doctor.node"]
    command += [str(probe), instance_type, str(count), (training and expected.environment_name) or ""]
    options = [f"--export=ALL,PYTHONPATH={PACKAGE.parent}"]
    if config:
        cluster = config.cluster
        chosen = {"account": cluster.account, "qos": cluster.qos, "reservation": cluster.reservation}
        options += [f"--{name}={value}" for name, value in chosen.items() if value]
    try:
        output, errors = expected.site.on_nodes(nodes, command, options)
    except UserError as problem:
        return [], str(problem)
    return parse_output(output), _first_message(errors)


def _first_message(errors: str) -> str:
    """The first line of srun's messages that says more than that a task ended."""
    lines = [line.strip() for line in errors.splitlines() if line.strip() and "Exited with exit code" not in line]
    return lines[0] if lines else "its task printed nothing"


def _node_row(node: SlurmNode, answer: NodeFindings | None, why_silent: str) -> Finding:
    name = f"node {node.name}"
    if answer is None and not node.idle:
        return warning(name, f"it is {node.state}; no job was sent")
    if answer is None and "Unable to allocate resources" in why_silent:  # a job for all, which one busy node holds up
        return warning(name, f"no job started: {why_silent}", "another job may have taken a node: run doctor again")
    if answer is None:
        remedy = "install the kit on a volume that every node mounts; if it is, see slurmd's log on the node"
        return error(name, f"no answer: {why_silent}", remedy)
    if wrong := [row for row in answer.rows if row.verdict == "error"]:
        found = "; ".join(f"{row.name}: {row.found}" for row in wrong)
        return error(name, found, "; ".join(dict.fromkeys(row.remedy for row in wrong)))
    unclear = [row.name for row in answer.rows if row.verdict == "warning"]
    doubt = f"; cannot tell: {', '.join(unclear)}" if unclear else ""
    return ok(name, ", ".join(row.name for row in answer.rows if row.verdict == "ok") + doubt)


def _compare_nodes(expected: Expectations, answers: Sequence[NodeFindings]) -> Iterator[Finding]:
    """Clocks; and what the health check before training finds, on the training nodes."""
    if len(answers) > 1:
        spread = max(one.time for one in answers) - min(one.time for one in answers)
        if spread > _CLOCK_SECONDS:
            latest = max(answers, key=lambda one: one.time).node
            yield error("clocks of nodes", f"{spread:.0f} s apart; {latest} is ahead", "synchronize them: chronyc")
        else:
            yield ok("clocks of nodes", f"within {spread:.1f} s, with the time that the tasks took to start")
    reports = [one.report for one in answers if one.report]
    if expected.instance and reports:
        found = problems(reports, expected.instance, replacement_on_slurm)
        for problem in found:
            what, _, remedy = problem.rpartition("; ")
            yield error("health", what, remedy)
        for doubt in doubts(reports, expected.instance):
            yield warning("health", doubt)
        if not found:
            counts = Counter(report.devices for report in reports if report.devices is not None)
            shown = ", ".join(f"{devices} devices on {nodes} nodes" for devices, nodes in counts.items())
            yield ok(
                "health", f"{len(reports)} training nodes of {expected.instance.name}" + (f", {shown}" if shown else "")
            )
