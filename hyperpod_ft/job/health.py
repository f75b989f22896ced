"""Check the nodes of a job before its ranks start: what they have, against their instance type and each other.

    python -m hyperpod_ft.job.health RUN_DIR        on every node of a job step, or on one node by hand

Each node writes a report to the shared volume; the first one waits for all of them, compares them, and prints each
problem as one line with the node's name and what to do about it. Exit status: 0 fit, 2 unfit, 1 when a node did not
report.
"""

import ctypes
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import TypeAdapter

from hyperpod_ft import drivers, publish
from hyperpod_ft.config.instances import CATALOGUE, Instance
from hyperpod_ft.errors import EXIT_USER_ERROR, UserError, print_error, printable
from hyperpod_ft.job.job_host import this_host
from hyperpod_ft.job.node_report import NodeReport, observe
from hyperpod_ft.job.recovery import report_failure
from hyperpod_ft.planning.engine_rules import rules_of
from hyperpod_ft.planning.pins import NEURON_DRIVERS
from hyperpod_ft.runs.job_files import ATTEMPT_DIRECTORY
from hyperpod_ft.runs.run import Run

_EXIT_MISSING_REPORT = 1
_REPORT_SECONDS = 60
# Room for a few checkpoints of an adapter, and for what compilers leave in /tmp; full training reports a full volume.
VOLUME_GIB = 10
TEMPORARY_GIB = 5
_PACKAGES_LISTED = 5  # in one line
_RDMA_DEVICES = Path("/sys/class/infiniband")  # also in a container
# Without aws-ofi-nccl, its plugin for EFA, NCCL silently uses TCP, unless NCCL_NET has the plugin's name.
EFA_PLUGIN = "AWS Libfabric"

_REPORT = TypeAdapter(NodeReport)


def problems(
    reports: Sequence[NodeReport], instance: Instance, replace: Callable[[str], str], others: Sequence[Instance] = ()
) -> list[str]:
    """One line for each problem; `replace(node)` says how to have a node replaced. `others`: what a node may be too.

    A node of another type is a good one in the wrong place: nothing else about it matters, and it is not replaced.
    """
    accepted = (instance, *others)
    strangers = [report for report in reports if not _known(report, accepted)]
    found = [
        f"{report.node}: is a {report.instance_type}, not a {instance.name}; set cluster.partition to a partition that"
        f" has {instance.name} nodes only"
        for report in strangers
    ]
    reports = [report for report in reports if report not in strangers]
    for report in reports:
        found += [f"{report.node}: {fault}" for fault in report.faults]
        found += [f"{report.node}: {what}; {replace(report.node)}" for what in _of_node(report, accepted)[0]]
        if report.temporary_gib is not None and report.temporary_gib < TEMPORARY_GIB:
            found.append(
                f"{report.node}: {report.temporary_gib:.1f} GiB free for temporary files, less than {TEMPORARY_GIB};"
                " free some space"
            )
    volume = min((report.volume_gib for report in reports if report.volume_gib is not None), default=None)
    if volume is not None and volume < VOLUME_GIB:
        found.append(f"{volume:.1f} GiB free on the shared volume, less than {VOLUME_GIB}; free some space")
    return found + _missing_efa(reports, accepted, replace) + _version_differences(reports, replace)


def doubts(reports: Sequence[NodeReport], instance: Instance, others: Sequence[Instance] = ()) -> list[str]:
    """One line for each thing that is not as the kit expects it, with which a training may be as good."""
    accepted = (instance, *others)
    return [
        f"{report.node}: {what}"
        for report in reports
        if _known(report, accepted)
        for what in (*report.doubts, *_of_node(report, accepted)[1])
    ]


def _known(report: NodeReport, accepted: Sequence[Instance]) -> bool:
    return report.instance_type in ("", *(one.name for one in accepted))


def _of_node(report: NodeReport, accepted: Sequence[Instance]) -> tuple[list[str], list[str]]:
    """What is wrong and what is doubtful about a node, as an instance of the type that it fits best."""
    possible = [one for one in accepted if report.instance_type in ("", one.name)]
    return min(
        ((_wrong(report, one), _doubtful(report, one)) for one in possible), key=lambda found: [*map(len, found)]
    )


def _wrong(report: NodeReport, instance: Instance) -> list[str]:
    found = []
    if report.devices is not None and report.devices != instance.devices:
        program = "neuron-ls" if instance.is_neuron else "nvidia-smi"
        found.append(f"{program} lists {report.devices} devices, {instance.name} has {instance.devices}")
    if report.device_files is not None and report.device_files != instance.devices:
        found.append(f"{report.device_files} of {instance.devices} device files /dev/neuron*")
    logical = (instance.ranks or 0) // max(instance.devices, 1)
    # neuron-ls counts logical cores if the node's own setting groups them
    odd = [cores for cores in report.device_cores if cores not in (logical, logical * instance.cores_per_rank)]
    if odd:
        found.append(f"{len(odd)} devices with {odd[0]} NeuronCores instead of {logical * instance.cores_per_rank}")
    if report.efa == 0 != instance.efa:
        found.append(f"fi_info lists 0 EFA interfaces, {instance.name} has {instance.efa}")
    return found


def _doubtful(report: NodeReport, instance: Instance) -> list[str]:
    if not report.efa or report.efa == instance.efa:
        return []
    return [f"fi_info lists {report.efa} EFA interfaces, {instance.name} has {instance.efa}"]


def _missing_efa(
    reports: Sequence[NodeReport], accepted: Sequence[Instance], replace: Callable[[str], str]
) -> list[str]:
    """One line for each node that has fewer interfaces than its type should and another node has."""
    most = max((report.efa or 0 for report in reports), default=0)
    return [
        f"{report.node}: {what}; another node has {most}; {replace(report.node)}"
        for report in reports
        if (report.efa or 0) < most
        for what in _of_node(report, accepted)[1]
    ]


def _version_differences(reports: Sequence[NodeReport], replace: Callable[[str], str]) -> list[str]:
    """One line for each node whose versions differ from those of most nodes; of two nodes, for the second."""
    names = sorted({name for report in reports for name in report.versions or ()})
    usual = {
        name: Counter((report.versions or {}).get(name, "missing") for report in reports).most_common(1)[0][0]
        for name in names
    }
    found = []
    for report in reports:
        own = {name: (report.versions or {}).get(name, "missing") for name in names}
        if odd := [f"{name} {own[name]} ({usual[name]})" for name in names if own[name] != usual[name]]:
            more = f" and {len(odd) - _PACKAGES_LISTED} more" if len(odd) > _PACKAGES_LISTED else ""
            what = f"versions differ from the other nodes' (theirs): {', '.join(odd[:_PACKAGES_LISTED])}{more}"
            found.append(f"{report.node}: {what}; {replace(report.node)}")
    return found


def nccl_uses_efa(instance: Instance, nodes: int) -> bool:
    """Whether NCCL is to use EFA between `nodes` nodes like this one."""
    if instance.device != "cuda" or nodes == 1 or os.environ.get("NCCL_NET", EFA_PLUGIN) != EFA_PLUGIN:
        return False
    return any((device / "device" / "driver").resolve().name == "efa" for device in _RDMA_DEVICES.glob("*"))


def _plugin_fault() -> str | None:
    """Why NCCL could not load its plugin for EFA in this environment. The search is its own (plugin_open.cc)."""
    name, missing = os.environ.get("NCCL_NET_PLUGIN"), ""
    for library in (name, f"libnccl-net-{name}.so") if name else ("libnccl-net.so",):
        try:
            ctypes.CDLL(library)
        except OSError as error:
            missing = str(error)
        else:
            return None
    if missing.startswith("libcudart"):  # torch will have loaded it
        return None
    return (
        f"has EFA, but NCCL does not find aws-ofi-nccl and would use TCP: {missing}; install it, or set LD_LIBRARY_PATH"
        " to its directory (/opt/amazon/ofi-nccl/lib) or NCCL_NET to Socket in cluster.environment"
    )


def _with_drivers(report: NodeReport, run: Run) -> NodeReport:
    """With what the drivers say to the packages that the ranks will use: those of the running interpreter."""
    config = run.config
    fault = drivers.cuda_fault() if config.instance.device == "cuda" else None
    ours = config.instance.is_neuron and not config.env.python  # what SDK another environment is of is not known
    wanted = NEURON_DRIVERS.get(rules_of(config.engine).environment_name(config)) if ours else None
    doubt = drivers.neuron_doubt(wanted) if wanted else None
    return replace(
        report, faults=(*report.faults, *filter(None, [fault])), doubts=(*report.doubts, *filter(None, [doubt]))
    )


def _gather(directory: Path, attempt: int, nodes: int) -> list[NodeReport]:
    """The reports of all nodes, in their order; fewer when some do not arrive in time."""
    deadline = time.monotonic() + _REPORT_SECONDS
    while True:
        paths = [path for number in range(nodes) if (path := _report_path(directory, attempt, number)).exists()]
        if len(paths) == nodes or time.monotonic() > deadline:
            return [_REPORT.validate_json(path.read_bytes()) for path in paths]
        time.sleep(0.05)


def _report_path(directory: Path, attempt: int, node_number: int) -> Path:
    return directory / f"node-{attempt}-{node_number}.json"


def check(run: Run) -> int:
    """Report on this node; on the first node, compare all reports. Returns the exit status."""
    instance, section = run.config.instance, run.config.sagemaker
    others = [CATALOGUE[name] for name in section.other_instance_types if name in CATALOGUE] if section else []
    in_step = ATTEMPT_DIRECTORY in os.environ
    host = this_host()
    nodes = host.nodes if in_step else 1
    report = _with_drivers(observe(instance, nodes, run.paths.root), run)
    if nccl_uses_efa(instance, nodes) and (fault := _plugin_fault()):
        report = replace(report, faults=(*report.faults, fault))
    if not in_step:
        _doubt(doubts([report], instance, others))
        return _print(problems([report], instance, host.replacement, others))
    directory = Path(os.environ[ATTEMPT_DIRECTORY])
    if not directory.is_dir():  # another volume, or none, is mounted where the first node has the shared one
        return _print([f"{report.node}: does not see {directory}; {host.replacement(report.node)}"])
    try:
        publish.write_json(_report_path(directory, host.attempt, host.number), asdict(report))
    except OSError as error:
        return _print([f"{host.name}: cannot write to {directory}: {error.strerror}; {host.replacement(host.name)}"])
    if host.number:
        return 0
    reports = _gather(directory, host.attempt, host.nodes)
    _doubt(doubts(reports, instance, others))
    if found := problems(reports, instance, host.replacement, others):
        report_failure(None, EXIT_USER_ERROR, time.time())
        return _print(found)
    if len(reports) < host.nodes:
        known = {report.node for report in reports}
        silent = [name for name in host.host_names() if name not in known]
        where = f"no report on {directory} within {_REPORT_SECONDS} s"
        _print([f"{node}: {where}; mount the volume there, or {host.replacement(node)}" for node in silent])
        return _EXIT_MISSING_REPORT
    return 0


def _doubt(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"warning: health: {printable(line)}", file=sys.stderr, flush=True)


def _print(lines: Sequence[str]) -> int:
    for line in lines:
        print_error("health", line)
    return EXIT_USER_ERROR if lines else 0


def main() -> int:
    """Run the command line; returns the exit status."""
    try:
        if len(sys.argv) != 2:
            raise UserError("usage: python -m hyperpod_ft.job.health RUN_DIR")
        return check(Run.open(Path(sys.argv[1])))
    except UserError as error:
        return _print([f"{this_host().name}: {error}"])


if __name__ == "__main__":
    sys.exit(main())
