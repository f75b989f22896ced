"""Checks of Slurm: that it answers, its partitions and nodes, and that it would accept the run's jobs."""

import getpass
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from hyperpod_ft.doctor.check import DoctorCheck, Expectations
from hyperpod_ft.errors import UserError
from hyperpod_ft.findings import Finding, error, ok, warning
from hyperpod_ft.launch.render import Installation, render
from hyperpod_ft.launch.slurm.site import HYPERPOD, PYXIS, SlurmSite, check_partition, pyxis_problem
from hyperpod_ft.runs.run import Run

_OLDEST = (21, 8)  # the oldest whose options and output the kit knows


def checks(expected: Expectations) -> list[DoctorCheck]:
    return [
        DoctorCheck("Slurm", lambda: _version(expected.site)),
        DoctorCheck("partitions", lambda: _partitions(expected)),
        DoctorCheck("nodes", lambda: _nodes(expected)),
        DoctorCheck("jobs", lambda: _jobs(expected)),
        DoctorCheck("auto-resume", lambda: auto_resume(expected.site)),
        *([DoctorCheck("container", lambda: _container(expected.site))] if expected.container else []),
        DoctorCheck("topology", lambda: _topology(expected.site)),
        DoctorCheck("accounting", lambda: _accounting(expected.site)),
    ]


def _version(site: SlurmSite) -> Finding:
    try:
        here = site.version()
        running = site.settings().get("SLURM_VERSION", here)
    except UserError as problem:
        return error("Slurm", problem.problem, problem.remedy)
    if tuple(int(number) for number in re.findall(r"\d+", running)[:2]) < _OLDEST:
        return error("Slurm", f"slurmctld {running} is older than 21.08", "use a newer image of HyperPod")
    return ok("Slurm", f"slurmctld {running} answers; programs {here}")


def _partitions(expected: Expectations) -> Iterator[Finding]:
    """The run's partitions exist, and training gets as many nodes as it needs, of its type."""
    nodes = expected.site.nodes()
    cluster = expected.config.cluster if expected.config else None
    if cluster is None:
        sizes = Counter(node.partition for node in nodes)
        yield ok("partitions", ", ".join(f"{name}: {count} nodes" for name, count in sizes.items()))
        return
    known = sorted({node.partition for node in nodes})
    if lost := [name for name in expected.partitions if name not in known]:
        has = f"no partition {' or '.join(lost)} with nodes; there are: {', '.join(known) or 'none'}"
        yield error("partitions", has, "correct cluster.partition and cluster.cpu_partition of the run file")
        return
    training = [node for node in nodes if node.partition == expected.training_partition]
    where = f"partition {expected.training_partition}"
    if len(training) < cluster.nodes:
        has = f"{where} has {len(training)} nodes, and the run needs {cluster.nodes}"
        yield error("partitions", has, "correct cluster.nodes or cluster.partition, or scale the group of workers")
        return
    try:
        check_partition(nodes, expected.training_partition, cluster.instance_type)
    except UserError as problem:
        yield error("partitions", problem.problem, problem.remedy)
    else:
        yield ok("partitions", f"{where} has {len(training)} nodes, for {cluster.nodes}")


def _nodes(expected: Expectations) -> Finding:
    """No node of the run's partitions is down or set aside."""
    nodes = {node.name: node for node in expected.nodes}.values()
    states = ", ".join(f"{count} {state}" for state, count in sorted(Counter(node.state for node in nodes).items()))
    if not nodes:
        return warning("nodes", "no nodes in the run's partitions")
    if lost := [node for node in nodes if node.lost]:
        shown = ", ".join(f"{node.name} is {node.state} ({node.reason or 'no reason given'})" for node in lost[:3])
        more = f", and {len(lost) - 3} more" if len(lost) > 3 else ""
        return error(
            "nodes", f"{states}: {shown}{more}", f"see scontrol show node {lost[0].name}, and slurmd's log there"
        )
    return ok("nodes", states)


def _jobs(expected: Expectations) -> Iterator[Finding]:
    """sbatch would accept the scripts that `submit` would write; without a run file, a job that trains."""
    if expected.config is None:
        why = expected.site.refusal("--requeue", "--exclusive", "--mem=0", "--nodes=1", "--wrap=true")
        yield _refused("--requeue --exclusive", why) if why else ok("jobs", "sbatch accepts --requeue and --exclusive")
        return
    # degrees that the kit would choose need the model's config.json: UserError without it
    scripts = render(Run.of(expected.config), Installation.here())
    with tempfile.TemporaryDirectory() as directory:
        refused: dict[str, list[str]] = {}
        for stage, text in scripts.items():
            script = Path(directory) / stage
            script.write_text(text, encoding="utf-8")
            if why := expected.site.refusal(str(script)):
                refused.setdefault(why, []).append(stage)
    if refused:
        yield from (_refused(", ".join(stages), why) for why, stages in refused.items())
    else:
        yield ok("jobs", f"sbatch accepts {', '.join(scripts)}")


def _refused(what: str, why: str) -> Finding:
    if "topology" in why.lower():
        remedy = "repair topology.conf or topology.yaml on the controller, then: sudo scontrol reconfigure"
    else:
        remedy = "correct the run file's cluster section"
    return error("jobs", f"sbatch refuses {what}: {why}", remedy)


def auto_resume(site: SlurmSite) -> Finding:
    """On HyperPod's nodes, training is started with an option of HyperPod's own plugin."""
    if not HYPERPOD.is_dir():
        return ok("auto-resume", f"not a node of HyperPod: no {HYPERPOD}")
    if why := site.refuses("--auto-resume=1"):
        return error(
            "auto-resume",
            why,
            "srun must load HyperPod's plugin: see plugstack.conf there, or update HyperPod's software",
        )
    return ok("auto-resume", "srun accepts --auto-resume=1")


def _container(site: SlurmSite) -> Finding:
    """srun knows Pyxis's options; whether the nodes do what they say, `--nodes` finds out."""
    if problem := pyxis_problem(site):
        return error("container", problem, PYXIS)
    return ok("container", "srun accepts --container-image")


def _topology(site: SlurmSite) -> Finding:
    """A tree or a block of switches without any makes Slurm refuse jobs, or slurmctld stop."""
    plugin = site.settings().get("TopologyPlugin", "").removeprefix("topology/")
    if plugin in ("tree", "block") and not site.has_switches():
        what = f"TopologyPlugin=topology/{plugin}, and slurmctld has no switches or blocks"
        return error("topology", what, "write topology.conf or topology.yaml on the controller, or use topology/flat")
    return ok("topology", plugin or "none")


def _accounting(site: SlurmSite) -> Finding:
    """The kit works without accounting; where it is on, it must know the user."""
    settings = site.settings()
    storage = settings.get("AccountingStorageType", "").removeprefix("accounting_storage/")
    if storage in ("", "none", "(null)"):
        return ok("accounting", "off: states of jobs come from squeue, scontrol and the run's own records")
    if why := site.accounting_problem():
        return error("accounting", f"{storage}, and sacct fails: {why}", "check slurmdbd on the controller")
    user = getpass.getuser()
    enforced = settings.get("AccountingStorageEnforce", "none")
    try:
        known = site.has_association(user)
    except UserError as problem:
        return warning("accounting", f"{storage}; {problem.problem}", problem.remedy)
    if not known and enforced not in ("none", "(null)"):
        remedy = f"on the controller: sudo sacctmgr add user {user} account=ACCOUNT"
        return error("accounting", f"{storage} enforces {enforced}, and does not know user {user}", remedy)
    return ok("accounting", f"{storage} answers" + ("" if known else f"; it does not know user {user}"))
