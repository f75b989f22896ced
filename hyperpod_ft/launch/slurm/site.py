"""What a Slurm cluster is like: its settings, partitions and nodes, what it accepts, and a command on its nodes."""

import os
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.slurm.programs import (
    START_CONTROLLER,
    TIMEOUT_SECONDS,
    failure,
    is_unreachable,
    message_of,
    run,
    without_defaults,
)

_NODE_STATE = re.compile(r"[a-z]+")  # without marks such as `*`, for a node that does not answer
_RUN_SECONDS = 120


@dataclass(frozen=True)
class SlurmNode:
    """A node in one of its partitions. `state` is sinfo's long form: idle, mixed, allocated, down*, drained, ..."""

    name: str
    partition: str
    state: str
    cpus: int
    memory_mb: int
    address: str
    reason: str  # why it is down or drained; empty otherwise

    @property
    def idle(self) -> bool:
        """Whether a small job starts on it now. On a mixed node, a job of one CPU may hold all memory."""
        return self.state == "idle"

    @property
    def lost(self) -> bool:
        """Whether it is down, drained, failed or does not answer; reserved or powered down ones are not."""
        word = _NODE_STATE.match(self.state)
        bad = ("down", "drained", "draining", "drng", "fail", "failing", "inval", "unknown", "error")
        return self.state.endswith("*") or (word is not None and word[0] in bad)


@dataclass(frozen=True)
class SlurmSite:
    """Slurm as its programs show it. `environment` is laid over this process's own. Methods raise UserError."""

    environment: Mapping[str, str] = field(default_factory=dict)

    def version(self) -> str:
        """The version of the programs on this machine, for example 22.05.8."""
        said = self._output(["srun", "--version"])
        if found := re.search(r"\d+\.\d+\S*", said):
            return found[0]
        raise UserError(
            f"srun --version: printed no version: {said!r}", "if srun is a wrapper here, have it print what srun prints"
        )

    def settings(self) -> dict[str, str]:
        """What `scontrol show config` prints."""
        lines = self._output(["scontrol", "show", "config"]).splitlines()
        return {key.strip(): value.strip() for key, found, value in (line.partition("=") for line in lines) if found}

    def nodes(self) -> list[SlurmNode]:
        """Every node, once for each of its partitions."""
        columns = "%N|%R|%T|%c|%m|%o|%E"  # the reason comes last: it may hold anything
        rows = [line.split("|", 6) for line in self._output(["sinfo", "-h", "-N", "-o", columns]).splitlines()]
        return [
            SlurmNode(name, partition, state, int(cpus), int(memory), address, "" if reason == "none" else reason)
            for name, partition, state, cpus, memory, address, reason in (row for row in rows if len(row) == 7)
        ]

    def default_partition(self) -> str:
        """The partition of jobs that name none; empty without one."""
        names = self._output(["sinfo", "-h", "-o", "%P"]).split()
        return next((name.rstrip("*") for name in names if name.endswith("*")), "")

    def has_switches(self) -> bool:
        """Whether a tree or block topology is in effect."""
        done = self._run(["scontrol", "show", "topology"])
        return done.returncode == 0 and "=" in done.stdout

    def refusal(self, *arguments: str) -> str:
        """Why sbatch would refuse a job of these arguments, in its words; empty if it accepts it. Submits nothing."""
        done = self._run(["sbatch", "--test-only", *arguments])
        if done.returncode and is_unreachable(done.stderr):
            raise failure("sbatch", done.stderr, "")
        return message_of(done.stderr) if done.returncode else ""

    def refuses(self, option: str) -> str:
        """Why srun refuses an option of a plugin, in its words; empty if it knows it."""
        # srun reads its options in their order, and prints its version only after those before it
        done = self._run(["srun", option, "--version"])
        first = (done.stderr.strip() or "gave no error message").splitlines()[0]
        return first if done.returncode else ""

    def accounting_problem(self) -> str:
        """Why sacct does not answer, in its words; empty if it does."""
        done = self._run(["sacct", "--noheader", "-X", "--starttime=now"])
        return message_of(done.stderr) if done.returncode else ""

    def has_association(self, user: str) -> bool:
        """Whether accounting knows the user. Raises UserError when sacctmgr does not say."""
        command = ["sacctmgr", "-nP", "show", "associations", f"user={user}", "format=account"]
        return bool(self._output(command).strip())

    def on_nodes(
        self, nodes: Sequence[SlurmNode], command: Sequence[str], options: Sequence[str] = ()
    ) -> tuple[str, str]:
        """Run a command once on each of these nodes of one partition, in one small job; returns its output and errors.

        Raises SlurmUnreachableError if that takes more than two minutes.
        """
        done = self._run(
            [
                "srun",
                *("--quiet", "--job-name=hyperpod-ft-doctor", "--time=5", "--immediate=60", "--chdir=/"),
                *("--ntasks-per-node=1", "--cpus-per-task=1", "--mem=500M", f"--nodes={len(nodes)}"),
                *(f"--partition={nodes[0].partition}", f"--nodelist={','.join(node.name for node in nodes)}"),
                *options,
                *command,
            ],
            _RUN_SECONDS,
        )
        return done.stdout, done.stderr

    @property
    def configured(self) -> bool:
        """Whether these programs are on PATH, and know of a cluster."""
        return self.installed and not self._run(["srun", "--version"]).returncode

    @property
    def installed(self) -> bool:
        """Whether Slurm's programs are on PATH."""
        return shutil.which("sbatch") is not None

    def _output(self, command: Sequence[str]) -> str:
        done = self._run(command)
        if done.returncode:
            raise failure(" ".join(command[:3]), done.stderr, START_CONTROLLER)
        return done.stdout

    def _run(self, command: Sequence[str], seconds: float = TIMEOUT_SECONDS) -> subprocess.CompletedProcess[str]:
        # a shell inside a job has variables with which srun would start a step of that job
        outside = {
            name: value
            for name, value in without_defaults(os.environ).items()
            if not name.startswith("SLURM_") or name == "SLURM_CONF"
        }
        return run(command, outside | dict(self.environment), Path("/"), seconds)


PYXIS = "load Pyxis in plugstack.conf, here and on every node (docs/install.md#containers), or remove env.container"


def pyxis_problem(site: SlurmSite) -> str:
    """Why srun here starts nothing in containers; empty if it does. Raises UserError without an answer of srun."""
    why = site.refuses("--container-image=none")
    return f"srun has no --container-image: {why}" if why else ""


HYPERPOD = Path("/opt/sagemaker_cluster")  # exists only on HyperPod's nodes
_ALL_NODES = "dev"  # HyperPod's default partition


def check_partition(nodes: Sequence[SlurmNode], partition: str, instance_type: str) -> None:
    """Refuse a partition of a HyperPod cluster that may have nodes of several types, if another has nodes of one size.

    A training job must not start on nodes of another type than its own.

    HyperPod puts all nodes into its default partition `dev`, those for login and for work without accelerators
    included. Slurm knows no instance types; nodes of one type have the same number of CPUs, but so have some of other
    types, such as m6i.32xlarge and trn1.32xlarge. So `dev` is also refused if every other partition has fewer nodes.
    `nodes`: all, once for each of their partitions. Raises UserError.
    """
    sizes: dict[str, set[int]] = defaultdict(set)
    names: dict[str, set[str]] = defaultdict(set)
    for node in nodes:
        sizes[node.partition].add(node.cpus)
        names[node.partition].add(node.name)
    others = sorted(name for name, found in sizes.items() if len(found) == 1 and name != partition)
    several = len(sizes[partition]) > 1
    if others and (several or (partition == _ALL_NODES and all(names[name] < names[partition] for name in others))):
        shown = ", ".join(map(str, sorted(sizes[partition])))
        has = f"nodes with {shown} CPUs" if several else "the nodes of all groups"
        raise UserError(
            f"cluster.partition: {partition} has {has}, so training could start on one that is not a {instance_type}",
            f"set it to the partition of the {instance_type} nodes, one of: {', '.join(others)}",
        )
