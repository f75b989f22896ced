"""Start, stop and ask about a local cluster, and cut the power of its nodes."""

import os
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from hyperpod_ft.errors import UserError
from hyperpod_ft.localcluster.ports import is_listening, reserve_ports
from hyperpod_ft.localcluster.processes import ProcessIdentity
from hyperpod_ft.localcluster.programs import Programs, find_programs
from hyperpod_ft.localcluster.runtime import ANSWER_S, Runtime
from hyperpod_ft.localcluster.slurm_conf import MAX_NODES, Shape

_UP_S = 60.0
_TAKES_JOBS = ("idle", "mixed", "allocated")


class NodeState(NamedTuple):
    """A node and what `sinfo` says of it: idle, mixed, allocated, down, down*, ..."""

    name: str
    state: str


@dataclass(frozen=True)
class ClusterStatus:
    """What a local cluster is doing. Without one running: no nodes, no ports, no pid, no version."""

    directory: Path
    running: bool
    nodes: tuple[NodeState, ...] = ()
    ports: tuple[int, ...] = ()
    pid: int | None = None
    slurm_version: str = ""


def default_directory() -> Path:
    """$HYPERPOD_FT_LOCAL, or hyperpod-ft/local in the user's state directory (XDG_STATE_HOME)."""
    if chosen := os.environ.get("HYPERPOD_FT_LOCAL"):
        return Path(chosen)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "hyperpod-ft" / "local"


class LocalCluster:
    """The local cluster of a directory, running or not. Several, of several directories, run side by side."""

    def __init__(self, directory: Path) -> None:
        self._runtime = Runtime(directory)
        self.directory = self._runtime.directory

    @property
    def conf(self) -> Path:
        """slurm.conf: the same path on every start, there only while the cluster is."""
        return self._runtime.conf

    @property
    def logs(self) -> Path:
        """Where the daemons of the latest start wrote."""
        return self._runtime.logs

    def environment(self) -> dict[str, str]:
        """What makes sbatch, srun and the others talk to this cluster."""
        return {"SLURM_CONF": str(self.conf)}

    def up(
        self,
        nodes: int = 2,
        cpus: int = 4,
        memory_mb: int | None = None,
        bound_to_parent: bool = False,
        bound_to_pid: int | None = None,
    ) -> bool:
        """Start the cluster and return when every node is idle. False if it was already up.

        `cpus` and `memory_mb` (MiB; the machine's, unless given) are what each node claims to have. The cluster
        outlives the caller unless `bound_to_parent` (it ends when the calling process does, however that ends) or
        `bound_to_pid` (the same for another process). Whatever a crash left is cleaned up first.

        Raises UserError if Slurm is missing, the sizes cannot be, it is up with others, or it does not come up.
        """
        programs = find_programs()
        if not 1 <= nodes <= MAX_NODES or cpus < 1:
            raise UserError(f"{nodes} nodes of {cpus} CPUs cannot be", f"ask for 1 to {MAX_NODES} nodes, 1 CPU or more")
        bound_to = os.getpid() if bound_to_parent else bound_to_pid
        owner = None if bound_to is None else ProcessIdentity.of(bound_to)
        if bound_to is not None and owner is None:
            raise UserError(f"there is no process {bound_to} to bind the cluster to")
        deadline = time.monotonic() + _UP_S
        lock = self._lock_unless_up(deadline)
        if lock is None:
            self._require_shape(nodes, cpus)
            return False
        with lock:
            self._runtime.clear()
            block = reserve_ports(nodes + 1)
            with block.lock:
                shape = Shape(
                    nodes=nodes,
                    cpus=cpus,
                    memory_mb=_machine_memory_mb() if memory_mb is None else memory_mb,
                    first_port=block.first,
                    first_job_id=self._runtime.next_job_id(block),
                    slurm_version=programs.version_text,
                )
                try:
                    self._runtime.create(shape, programs)
                    held_fds = (lock.fileno(), block.lock.fileno())
                    if not self._runtime.start_watch(shape, programs, held_fds, owner):
                        raise self._failure("the watch over its daemons does not start")
                    self._wait_until_idle(shape, programs, deadline)
                    self._command("keep")
                except BaseException:  # Ctrl-C too
                    self._runtime.ask("stop")
                    with suppress(OSError):  # guards of a killed watch may still be at work; the next up clears
                        self._runtime.clear()
                    raise
        return True

    def down(self) -> bool:
        """Kill every daemon and job process, and forget the jobs. False if there was nothing to stop."""
        was_running = self._runtime.ask("stop") is not None
        if not self.directory.is_dir():
            return was_running
        deadline = time.monotonic() + ANSWER_S
        while (lock := self._runtime.try_lock()) is None:  # the guards of a killed watch are at work
            if time.monotonic() > deadline:
                raise UserError(f"{self.directory} stays locked", f"see `fuser {self.directory}/lock`")
            time.sleep(0.01)
        with lock:
            self._runtime.clear()
        return was_running

    def kill_node(self, name: str) -> None:
        """Cut a node's power: its slurmd, step daemons and tasks get SIGKILL at once.

        Slurm is told that the node is down, as HyperPod's health agent tells it, rather than left to find out
        after SlurmdTimeout: jobs on it end as NODE_FAIL, or are requeued, within a second.
        """
        self._require_node(name)
        self._command(f"kill {name}")
        self._scontrol("update", f"NodeName={name}", "State=DOWN", "Reason=power cut")

    def start_node(self, name: str) -> None:
        """Start a node again (cutting its power first if it is on) and return when it takes jobs."""
        shape = self._require_node(name)
        programs = find_programs()
        self._command(f"start {name}")
        deadline = time.monotonic() + _UP_S
        while not is_listening(shape.ports[1 + shape.node_names.index(name)]) and time.monotonic() < deadline:
            time.sleep(0.02)
        while (state := self._node_states(programs).get(name, "unknown")) not in _TAKES_JOBS:
            if time.monotonic() > deadline:
                raise self._failure(f"{name} is {state}")
            if state.startswith(("down", "drain")):
                # A node that was set down stays so, whatever ReturnToService says.
                self._scontrol("update", f"NodeName={name}", "State=RESUME")
            time.sleep(0.1)

    def status(self) -> ClusterStatus:
        """Ask now. A running cluster whose slurmctld does not answer has nodes of state `unknown`."""
        answer = self._runtime.ask("ping")
        if answer is None:
            return ClusterStatus(self.directory, running=False)
        shape = self._runtime.shape()
        states = self._node_states(find_programs())
        return ClusterStatus(
            self.directory,
            running=True,
            nodes=tuple(NodeState(name, states.get(name, "unknown")) for name in shape.node_names),
            ports=shape.ports,
            pid=int(answer.split()[1]),
            slurm_version=shape.slurm_version,
        )

    def require_running(self) -> None:
        """Raise UserError unless the cluster is up."""
        if self._runtime.ask("ping") is None:
            raise UserError(f"no local cluster runs in {self.directory}", "start it with `hyperpod-ft local up`")

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

    def _require_shape(self, nodes: int, cpus: int) -> None:
        shape = self._runtime.shape()
        if (shape.nodes, shape.cpus) != (nodes, cpus):
            raise UserError(
                f"a local cluster of {shape.nodes} nodes x {shape.cpus} CPUs is already up, not {nodes} x {cpus}",
                "first stop it with `hyperpod-ft local down`",
            )

    def _require_node(self, name: str) -> Shape:
        self.require_running()
        shape = self._runtime.shape()
        if name not in shape.node_names:
            raise UserError(f"no node {name!r} in this local cluster", f"it has {', '.join(shape.node_names)}")
        return shape

    def _wait_until_idle(self, shape: Shape, programs: Programs, deadline: float) -> None:
        controller_listens = False
        while True:
            self._command("ping")
            controller_listens = controller_listens or is_listening(shape.ports[0])
            states = self._node_states(programs) if controller_listens else {}
            if states == dict.fromkeys(shape.node_names, "idle"):
                return
            if time.monotonic() > deadline:
                raise self._failure(f"after {_UP_S:.0f} s its nodes are {states}")
            time.sleep(0.05)

    def _command(self, words: str) -> None:
        if self._runtime.ask(words) is None:
            raise self._failure("the watch over its daemons ended")

    def _failure(self, what: str) -> UserError:
        """An error with the last fatal word of a daemon, if there is one."""
        lines = [line for log in sorted(self.logs.glob("*")) for line in log.read_text(errors="replace").splitlines()]
        fatal = [line.strip() for line in lines if "fatal:" in line or "Error:" in line]
        return UserError(": ".join(["the local Slurm does not run", what, *fatal[-1:]]), f"see {self.logs}")

    def _node_states(self, programs: Programs) -> dict[str, str]:
        words = self._client([programs.sinfo, "-h", "-N", "-o", "%N %T"]).split()
        return dict(zip(words[::2], words[1::2], strict=False))

    def _scontrol(self, *arguments: str) -> None:
        self._client([find_programs().scontrol, *arguments])

    def _client(self, argv: list[str]) -> str:
        """What a Slurm client prints; nothing if it fails, as it may while daemons come and go."""
        with suppress(subprocess.TimeoutExpired):
            return subprocess.run(
                argv,
                env={**os.environ, **self.environment()},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=ANSWER_S,
                check=False,
            ).stdout
        return ""


def _machine_memory_mb() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
