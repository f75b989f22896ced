"""Whether the nodes of a job that trains are fit, before it starts: what is there against the catalogue.

    python -m hyperpod_ft.job.health RUN_DIR        on every node of a job step, or on one node by hand

Each node looks at itself and writes a report to the shared volume; the first one waits for all of them, compares, and
prints each problem in a line with the node's name and what to do about it. Exit status: 0 fit, 2 not, 1 when a node
did not report.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.config.instances import CATALOGUE, Instance
from hyperpod_ft.errors import EXIT_USER_ERROR, UserError
from hyperpod_ft.job import neuron_devices
from hyperpod_ft.job.attempts import ATTEMPT_DIRECTORY, Ending, node_name, step_number
from hyperpod_ft.launch.slurm import Slurm
from hyperpod_ft.runs.run import Run

HYPERPOD = Path("/opt/sagemaker_cluster")  # there on HyperPod's nodes only
_EXIT_MISSING_REPORT = 1
_PROGRAM_SECONDS = 30
_REPORT_SECONDS = 60
# For a checkpoint or two of an adapter, and for what compilers leave in /tmp; full training fails by itself in a line.
_VOLUME_GIB = 10
_TEMPORARY_GIB = 5
_NAMED = 5  # packages in one line
# Where AWS's images have what may not be on PATH.
_PROGRAM_DIRECTORIES = ("/opt/amazon/efa/bin",)


@dataclass(frozen=True)
class Report:
    """What one node has. A count is None where it was not asked for, or what should tell it says nothing."""

    node: str
    devices: int | None = None  # accelerators that the driver's own program lists
    device_cores: tuple[int, ...] = ()  # NeuronCores of each, physical or logical
    device_files: int | None = None  # /dev/neuron*
    efa: int | None = None
    volume_gib: float | None = None  # free on the shared volume
    temporary_gib: float | None = None  # free in /tmp
    versions: Mapping[str, str] | None = None  # of the driver and of every package of the interpreter
    faults: tuple[str, ...] = ()  # what is wrong already, with its remedy


def observe(instance: Instance, nodes: int, volume: Path) -> Report:
    """Look at this node: where there are no accelerators at versions only, and at those only among several nodes."""
    versions = _package_versions() if nodes > 1 else {}
    if not instance.has_accelerators:
        return Report(node_name(), versions=versions)
    devices: int | None = None
    device_cores: tuple[int, ...] = ()
    device_files: int | None = None
    faults: list[str] = []
    if instance.device == "neuron":
        try:
            program = neuron_devices.neuron_ls()
            listing = None if program is None else neuron_devices.devices(program)
        except UserError as error:
            listing = None
            faults.append(str(error))
        if listing is not None:
            devices = len(listing)
            counts = [entry.get("nc_count") for entry in listing]
            device_cores = tuple(count for count in counts if isinstance(count, int))
        device_files = sum(bool(re.fullmatch(r"neuron\d+", path.name)) for path in Path("/dev").iterdir())
        versions["neuron driver"] = (_output("modinfo", "-F", "version", "neuron") or "").strip()
    else:
        drivers = (_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "").split()
        devices = len(drivers)
        versions["nvidia driver"] = drivers[0] if drivers else ""
    return Report(
        node=node_name(),
        devices=devices,
        device_cores=device_cores,
        device_files=device_files,
        efa=_efa_interfaces(_output("fi_info", "-p", "efa")) if nodes > 1 else None,
        faults=tuple(faults),
        volume_gib=shutil.disk_usage(volume).free / 2**30,
        temporary_gib=shutil.disk_usage(tempfile.gettempdir()).free / 2**30,
        versions=versions,
    )


def problems(reports: Sequence[Report], instance: Instance, replace: Callable[[str], str]) -> list[str]:
    """A line for each thing that is not as it should be; `replace(node)` says how to have a node replaced."""
    found: list[str] = []
    for report in reports:
        found += [f"{report.node}: {fault}" for fault in report.faults]
        found += [f"{report.node}: {what}; {replace(report.node)}" for what in _of_node(report, instance)]
        if report.temporary_gib is not None and report.temporary_gib < _TEMPORARY_GIB:
            found.append(
                f"{report.node}: {report.temporary_gib:.1f} GiB free for temporary files, less than {_TEMPORARY_GIB};"
                " free some"
            )
    volume = min((report.volume_gib for report in reports if report.volume_gib is not None), default=None)
    if volume is not None and volume < _VOLUME_GIB:
        found.append(f"{volume:.1f} GiB free on the shared volume, less than {_VOLUME_GIB}; free some")
    return found + _version_differences(reports, replace)


def _of_node(report: Report, instance: Instance) -> list[str]:
    found = []
    if report.devices is not None and report.devices != instance.devices:
        teller = "neuron-ls" if instance.device == "neuron" else "nvidia-smi"
        found.append(f"{teller} lists {report.devices} devices, {instance.name} has {instance.devices}")
    if report.device_files is not None and report.device_files != instance.devices:
        found.append(f"{report.device_files} of {instance.devices} device files /dev/neuron*")
    logical = (instance.ranks or 0) // max(instance.devices, 1)
    # neuron-ls counts logical cores where the node's own setting groups them
    odd = [cores for cores in report.device_cores if cores not in (logical, logical * instance.cores_per_rank)]
    if odd:
        found.append(f"{len(odd)} devices with {odd[0]} NeuronCores instead of {logical * instance.cores_per_rank}")
    if report.efa is not None and report.efa != instance.efa:
        found.append(f"fi_info lists {report.efa} EFA interfaces, {instance.name} has {instance.efa}")
    return found


def _version_differences(reports: Sequence[Report], replace: Callable[[str], str]) -> list[str]:
    """A line for each node whose versions are not those of most nodes; of two that differ, for the second."""
    names = sorted({name for report in reports for name in report.versions or ()})
    usual = {
        name: Counter((report.versions or {}).get(name, "missing") for report in reports).most_common(1)[0][0]
        for name in names
    }
    found = []
    for report in reports:
        own = {name: (report.versions or {}).get(name, "missing") for name in names}
        if odd := [f"{name} {own[name]} ({usual[name]})" for name in names if own[name] != usual[name]]:
            more = f" and {len(odd) - _NAMED} more" if len(odd) > _NAMED else ""
            what = f"versions differ from the other nodes' (theirs): {', '.join(odd[:_NAMED])}{more}"
            found.append(f"{report.node}: {what}; {replace(report.node)}")
    return found


def replacement(node: str) -> str:
    """What has a node replaced: HyperPod's own way there, elsewhere what keeps Slurm from using it."""
    if HYPERPOD.is_dir():
        return f'have it replaced: scontrol update node={node} state=fail reason="Action:Replace"'
    return f'take it out: scontrol update nodename={node} state=drain reason="hyperpod-ft health"'


def _output(*command: str) -> str | None:
    """What a program prints; nothing when it fails, or hangs, as on a node that is not well; None: it is not there."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *_PROGRAM_DIRECTORIES])
    program = shutil.which(command[0], path=path)
    if program is None:
        return None
    try:
        return subprocess.run(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=_PROGRAM_SECONDS,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _efa_interfaces(text: str | None) -> int | None:
    """Interfaces in the output of `fi_info -p efa`, which lists each once for every endpoint type it offers."""
    if text is None:
        return None
    domains = re.findall(r"^\s*domain:\s*(\S+)", text, re.MULTILINE)
    return len({re.sub(r"-(rdm|dgrm|direct)$", "", domain) for domain in domains})


def _package_versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for distribution in metadata.distributions():
        found.setdefault(distribution.name, distribution.version)  # as an import would, the first on the path
    return found


def _gather(directory: Path, nodes: int) -> list[Report]:
    """The reports of all nodes, in their order; fewer when some do not come in time."""
    deadline = time.monotonic() + _REPORT_SECONDS
    while True:
        paths = [path for number in range(nodes) if (path := _report(directory, number)).exists()]
        if len(paths) == nodes or time.monotonic() > deadline:
            return [
                Report(**values | {key: tuple(values[key]) for key in ("device_cores", "faults")})
                for values in (json.loads(path.read_text(encoding="utf-8")) for path in paths)
            ]
        time.sleep(0.05)


def _report(directory: Path, number: int) -> Path:
    return directory / f"node-{step_number()}-{number}.json"


def check(run: Run) -> int:
    """Report on this node; on the first node, judge them all. Returns the exit status."""
    instance = CATALOGUE[run.config.cluster.instance_type]
    in_step = ATTEMPT_DIRECTORY in os.environ
    nodes = int(os.environ.get("SLURM_NNODES", "1")) if in_step else 1
    number = int(os.environ.get("SLURM_NODEID", "0")) if in_step else 0
    report = observe(instance, nodes, run.root)
    if not in_step:
        return _tell(problems([report], instance, replacement))
    directory = Path(os.environ[ATTEMPT_DIRECTORY])
    if not directory.is_dir():  # another volume, or none, lies where the shared one is on the first node
        return _tell([f"{report.node}: does not see {directory}; {replacement(report.node)}"])
    try:
        publish.write_json(_report(directory, number), asdict(report))
    except OSError as error:
        return _tell([f"{report.node}: cannot write to {directory}: {error.strerror}; {replacement(report.node)}"])
    if number:
        return 0
    reports = _gather(directory, nodes)
    if found := problems(reports, instance, replacement):
        Ending.write_here(None, EXIT_USER_ERROR, time.time())
        return _tell(found)
    if len(reports) < nodes:
        known = {report.node for report in reports}
        silent = [name for name in Slurm().host_names(os.environ["SLURM_JOB_NODELIST"]) if name not in known]
        where = f"no report on {directory} within {_REPORT_SECONDS} s"
        _tell([f"{node}: {where}; is the volume mounted there? or {replacement(node)}" for node in silent])
        return _EXIT_MISSING_REPORT
    return 0


def _tell(lines: Sequence[str]) -> int:
    for line in lines:
        print(f"error: health: {line}", file=sys.stderr, flush=True)
    return EXIT_USER_ERROR if lines else 0


def main() -> int:
    """Run the command line; returns the exit status."""
    try:
        if len(sys.argv) != 2:
            raise UserError("usage: python -m hyperpod_ft.job.health RUN_DIR")
        return check(Run.open(Path(sys.argv[1])))
    except UserError as error:
        return _tell([f"{node_name()}: {error}"])


if __name__ == "__main__":
    sys.exit(main())
