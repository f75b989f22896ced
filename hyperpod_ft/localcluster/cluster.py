"""Start and stop a local cluster, report its state, cut the power of its nodes, and kill its daemons."""

import os
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from hyperpod_ft.errors import UserError
from hyperpod_ft.localcluster.ports import is_listening, reserve_ports
from hyperpod_ft.localcluster.programs import Programs, find_programs
from hyperpod_ft.localcluster.runtime import ANSWER_SECONDS, Runtime
from hyperpod_ft.localcluster.slurm_conf import MAX_NODES, ClusterSpec
from hyperpod_ft.processes import ProcessIdentity
from hyperpod_ft.shipped import state_directory

_UP_SECONDS = 300.0
_TAKES_JOBS = ("idle", "mixed", "allocated")


class NodeState(NamedTuple):
    """A node and its state from `sinfo`: idle, mixed, allocated, down, down*, ..."""

    name: str
    state: str


@dataclass(frozen=True)
class ClusterStatus:
    """The state of a local cluster. If it is down: no nodes, ports, pid or version."""

    directory: Path
    running: bool
    nodes: tuple[NodeState, ...] = ()
    ports: tuple[int, ...] = ()
    pid: int | None = None
    slurm_version: str = ""


def default_directory() -> Path:
    """$HYPERPOD_FT_LOCAL, or hyperpod-ft/local in the user's state directory (XDG_STATE_HOME)."""
    return Path(os.environ.get("HYPERPOD_FT_LOCAL") or state_directory() / "local")


class LocalCluster:
    """The local cluster of a directory, running or not. Several, of several directories, run side by side."""

    def __init__(self, directory: Path) -> None:
        self._runtime = Runtime(directory)
        self.directory = self._runtime.directory
        self.name = self._runtime.name  # the same for every start in this directory
        self.conf = self._runtime.conf  # slurm.conf: the same path too; exists only while the cluster runs
        self.logs = self._runtime.logs  # of the latest start

    def environment(self) -> dict[str, str]:
        """The variables with which sbatch, srun and the other clients use this cluster."""
        return {"SLURM_CONF": str(self.conf)}

    def up(
        self,
        nodes: int = 2,
        cpus: int = 4,
        memory_mb: int | None = None,
        bound_to: int | None = None,
    ) -> bool:
        """Start the cluster and return when every node is idle. False if it was already up.

        Each node claims `cpus` CPUs and `memory_mb` MiB (default: the machine's). The cluster outlives the caller;
        with `bound_to`, it ends with that process. The leftovers of a crash are cleaned up first.

        Raises UserError if Slurm is missing, the sizes are invalid, it is up with other sizes, or it does not start.
        """
        programs = find_programs()
        if not 1 <= nodes <= MAX_NODES or cpus < 1:
            raise UserError(
                f"invalid size: {nodes} nodes with {cpus} CPUs", f"use 1 to {MAX_NODES} nodes with 1 CPU or more"
            )
        owner = None if bound_to is None else ProcessIdentity.of(bound_to)
        if bound_to is not None and owner is None:
            raise UserError(f"no process {bound_to} to bind the cluster to", "pass the pid of a running process")
        deadline = time.monotonic() + _UP_SECONDS
        lock = self._lock_unless_up(deadline)
        if lock is None:
            self._require_spec(nodes, cpus)
            return False
        with lock:
            self._runtime.clear()
            block = reserve_ports(nodes + 1)
            with block.lock:
                spec = ClusterSpec(
                    nodes=nodes,
                    cpus=cpus,
                    memory_mb=_machine_memory_mb() if memory_mb is None else memory_mb,
                    first_port=block.first,
                    first_job_id=self._runtime.next_job_id(block),
                    slurm_version=programs.version_text,
                )
                self._start(spec, programs, (lock.fileno(), block.lock.fileno()), owner, deadline)
        return True

    def _start(
        self,
        spec: ClusterSpec,
        programs: Programs,
        held_fds: tuple[int, ...],
        owner: ProcessIdentity | None,
        deadline: float,
    ) -> None:
        """Start the daemons and wait until every node is idle; if that fails, none of them is left."""
        try:
            self._runtime.create(spec, programs)
            if not self._runtime.start_watch(spec, programs, held_fds, owner):
                raise self._failure("the process that watches its daemons does not start")
            self._wait_until_idle(spec, programs, deadline)
            self._command("keep")
        except BaseException:  # Ctrl-C too
            self._runtime.ask("stop")
            with suppress(OSError):  # guards of a killed watch may still be running; the next `up` clears
                self._runtime.clear()
            raise

    def down(self) -> bool:
        """Kill every daemon and job process, and forget the jobs. False if there was nothing to stop."""
        was_running = self._runtime.ask("stop") is not None
        if not self.directory.is_dir():
            return was_running
        deadline = time.monotonic() + ANSWER_SECONDS
        while (lock := self._runtime.try_lock()) is None:  # the guards of a killed watch are still running
            if time.monotonic() > deadline:
                raise UserError(
                    f"{self.directory} is still locked", f"find the process with `fuser {self.directory}/lock`"
                )
            time.sleep(0.01)
        with lock:
            self._runtime.clear()
        return was_running

    def kill_node(self, name: str) -> None:
        """Cut a node's power: its slurmd, step daemons and tasks get SIGKILL at once.

        The node is set to DOWN in Slurm at once, as HyperPod's health agent does, instead of after SlurmdTimeout: its
        jobs end as NODE_FAIL, or are requeued, within a second.
        """
        self._require_node(name)
        self._command(f"kill {name}")
        self._scontrol("update", f"NodeName={name}", "State=DOWN", "Reason=power cut")

    def start_node(self, name: str) -> None:
        """Start a node again (cutting its power first if it is on) and return when it accepts jobs."""
        spec = self._require_node(name)
        programs = find_programs()
        self._command(f"start {name}")
        deadline = time.monotonic() + _UP_SECONDS
        while not is_listening(spec.ports[1 + spec.node_names.index(name)]) and time.monotonic() < deadline:
            time.sleep(0.02)
        while (state := self._node_states(programs).get(name, "unknown")) not in _TAKES_JOBS:
            if time.monotonic() > deadline:
                raise self._failure(f"{name} is {state}")
            if state.startswith(("down", "drain")):
                # A node that was set to DOWN stays so, regardless of ReturnToService.
                self._scontrol("update", f"NodeName={name}", "State=RESUME")
            time.sleep(0.1)

    def kill_controller(self) -> None:
        """Kill slurmctld with SIGKILL: jobs go on, and Slurm's clients get no answer until `start_controller`."""
        self.require_running()
        self._command("kill slurmctld")

    def start_controller(self) -> None:
        """Start slurmctld again, from the state that it saved, and return when it answers."""
        self.require_running()
        self._command("start slurmctld")
        deadline = time.monotonic() + _UP_SECONDS
        while not self._node_states(find_programs()):
            if time.monotonic() > deadline:
                raise self._failure("slurmctld does not answer")
            time.sleep(0.1)

    def restart_slurmd(self, name: str) -> None:
        """Kill the slurmd of a node with SIGKILL and start it again at once: the node's jobs go on."""
        self._require_node(name)
        self._command(f"restart {name}")

    def status(self) -> ClusterStatus:
        """The current state. Nodes are `unknown` while slurmctld does not answer."""
        answer = self._runtime.ask("ping")
        if answer is None:
            return ClusterStatus(self.directory, running=False)
        spec = self._runtime.spec()
        states = self._node_states(find_programs())
        return ClusterStatus(
            self.directory,
            running=True,
            nodes=tuple(NodeState(name, states.get(name, "unknown")) for name in spec.node_names),
            ports=spec.ports,
            pid=int(answer.split()[1]),
            slurm_version=spec.slurm_version,
        )

    def require_running(self) -> None:
        """Raise UserError unless the cluster is up."""
        if self._runtime.ask("ping") is None:
            raise UserError(f"no local cluster is running in {self.directory}", "start it with `hyperpod-ft local up`")

    def _lock_unless_up(self, deadline: float) -> IO[bytes] | None:
        """The lock, to start under; None if the cluster is up. Waits for another `up` or `down` to finish."""
        while True:
            answer = self._runtime.ask("ping")
            if answer and answer.startswith("up"):
                return None
            lock = self._runtime.try_lock()
            if lock and answer is None:
                return lock
            if lock:  # a cluster is starting, and its lock file was deleted
                lock.close()
            if time.monotonic() > deadline:
                raise UserError(f"{self.directory} is locked by another process", "wait, or use another directory")
            time.sleep(0.05)

    def _require_spec(self, nodes: int, cpus: int) -> None:
        spec = self._runtime.spec()
        if (spec.nodes, spec.cpus) != (nodes, cpus):
            raise UserError(
                f"a local cluster of {spec.nodes} nodes x {spec.cpus} CPUs is already up, not {nodes} x {cpus}",
                "stop it first with `hyperpod-ft local down`",
            )

    def _require_node(self, name: str) -> ClusterSpec:
        self.require_running()
        spec = self._runtime.spec()
        if name not in spec.node_names:
            raise UserError(f"no node {name!r} in this local cluster", f"its nodes: {', '.join(spec.node_names)}")
        return spec

    def _wait_until_idle(self, spec: ClusterSpec, programs: Programs, deadline: float) -> None:
        controller_listens = False
        while True:
            self._command("ping")
            controller_listens = controller_listens or is_listening(spec.ports[0])
            states = self._node_states(programs) if controller_listens else {}
            if states == dict.fromkeys(spec.node_names, "idle"):
                return
            if time.monotonic() > deadline:
                raise self._failure(f"after {_UP_SECONDS:.0f} s its nodes are {states}")
            time.sleep(0.05)

    def _command(self, words: str) -> None:
        if self._runtime.ask(words) is None:
            raise self._failure("the process that watches its daemons ended")

    def _failure(self, what: str) -> UserError:
        """An error with the last fatal message of a daemon, if there is one."""
        lines = [line for log in sorted(self.logs.glob("*")) for line in log.read_text(errors="replace").splitlines()]
        fatal = [line.strip() for line in lines if "fatal:" in line or "Error:" in line]
        return UserError(": ".join(["the local Slurm is not running", what, *fatal[-1:]]), f"see {self.logs}")

    def _node_states(self, programs: Programs) -> dict[str, str]:
        words = self._client([programs.sinfo, "-h", "-N", "-o", "%N %T"]).split()
        return dict(zip(words[::2], words[1::2], strict=False))

    def _scontrol(self, *arguments: str) -> None:
        self._client([find_programs().scontrol, *arguments])

    def _client(self, argv: list[str]) -> str:
        """A Slurm client's output; empty if it fails, as it may while daemons start and stop."""
        with suppress(subprocess.TimeoutExpired):
            return subprocess.run(
                argv,
                env={**os.environ, **self.environment()},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=ANSWER_SECONDS,
                check=False,
            ).stdout
        return ""


def _machine_memory_mb() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
