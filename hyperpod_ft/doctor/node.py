"""Look at one node, as a task of the job that `doctor --nodes` starts:

    python -m hyperpod_ft.doctor.node PROBE INSTANCE_TYPE NODES ENVIRONMENT

PROBE is a file on the shared volume that the head node holds locked. Prints `NodeFindings`, with the report of the
health check before training, as lines that `parse_output` reads. An empty INSTANCE_TYPE or ENVIRONMENT leaves out
what depends on it.
"""

import base64
import json
import sys
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from hyperpod_ft.config.instances import CATALOGUE
from hyperpod_ft.doctor import machine, slurm, volume
from hyperpod_ft.doctor.check import DoctorCheck, run_checks
from hyperpod_ft.drivers import is_older
from hyperpod_ft.findings import Finding, error, ok, warning
from hyperpod_ft.job.job_host import this_host
from hyperpod_ft.job.node_report import NodeReport, observe
from hyperpod_ft.launch import torch_neuron
from hyperpod_ft.launch.slurm.site import SlurmSite
from hyperpod_ft.planning.pins import NEURON_DRIVERS

_MARK, _LINE = "hyperpod-ft-doctor:", 800


@dataclass(frozen=True)
class NodeFindings:
    """What a node says about itself. `time` is its clock's, in seconds since the epoch."""

    node: str
    time: float
    rows: tuple[Finding, ...]
    report: NodeReport | None  # of its devices, packages and disks; None without an instance type


_FINDINGS = TypeAdapter(NodeFindings)


def check_node(probe: Path, instance_type: str, nodes: int, environment: str) -> NodeFindings:
    """The findings of this node."""
    now = time.time()  # before checks that may take long: the clocks of nodes are compared by it
    rows = run_checks(
        [
            DoctorCheck("volume", lambda: check_shared(probe)),
            DoctorCheck("locks", lambda: volume.locks(probe.parent)),
            DoctorCheck("clock", machine.clock),
            DoctorCheck("temporary files", machine.temporary),
            DoctorCheck("auto-resume", lambda: slurm.auto_resume(SlurmSite())),
        ]
    )
    report = observe(CATALOGUE[instance_type], nodes, probe.parent) if instance_type else None
    if report and environment in NEURON_DRIVERS and report.versions is not None:
        rows.append(check_driver(report.versions.get("neuron driver", ""), environment))
    if environment == "torch-neuron" and (problem := torch_neuron.system_problem()):
        rows.append(error("system", problem, torch_neuron.REMEDY))
    return NodeFindings(this_host().name, now, tuple(rows), report)


def check_shared(probe: Path) -> Finding:
    """The head node's file is here, and so is its lock."""
    if not probe.exists():
        return error(
            "volume", f"{probe.parent.parent} is not the head node's volume", "mount the same file system on this node"
        )
    with probe.open("a") as stream:
        if not volume.is_locked(stream.fileno()):
            return error("volume", "a lock of the head node does not hold here", volume.REMOUNT)
    return ok("volume", "the head node's files and locks are seen")


def check_driver(version: str, environment: str) -> Finding:
    """The driver is that of the environment's SDK, or newer."""
    wanted = NEURON_DRIVERS[environment]
    if not version:
        return warning("Neuron driver", "modinfo shows no version of module neuron")
    if is_older(version, wanted):
        return error(
            "Neuron driver",
            f"{version} is older than {wanted}, which AWS released with the SDK of {environment}",
            "hyperpod-ft cluster update (docs/cluster-day-two.md), or choose an older env.sdk",
        )
    return ok("Neuron driver", f"{version}, not older than {wanted} of {environment}")


def encode_lines(answer: NodeFindings) -> list[str]:
    """What a task prints. srun mixes the output of tasks, and cuts lines that are longer than a kilobyte."""
    text = base64.b64encode(json.dumps(asdict(answer)).encode()).decode()
    return [f"{_MARK} {answer.node} {text[start : start + _LINE]}" for start in range(0, len(text), _LINE)]


def parse_output(output: str) -> list[NodeFindings]:
    """The nodes' answers, from the output of all tasks; incomplete answers are dropped."""
    parts: dict[str, str] = defaultdict(str)
    for line in output.splitlines():
        mark, _, rest = line.partition(" ")
        node, _, part = rest.partition(" ")
        if mark == _MARK:
            parts[node] += part
    answers = []
    for text in parts.values():
        with suppress(ValueError):
            answers.append(_FINDINGS.validate_json(base64.b64decode(text)))
    return answers


def main() -> None:
    probe, instance_type, nodes, environment = sys.argv[1:]
    print("\n".join(encode_lines(check_node(Path(probe), instance_type, int(nodes), environment))), flush=True)


if __name__ == "__main__":
    main()
