"""A user's cluster: a local Slurm of four nodes, a small volume, the kit's commands, and the processes of its jobs."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command import ROOT
from benchmarks.soaking.shim import Shim
from hyperpod_ft.job.watch import LIMIT
from hyperpod_ft.localcluster import LocalCluster
from hyperpod_ft.processes import children, descendants

HANG_S = 8.0  # without progress are a hang
_VOLUME_BYTES = 12 << 30  # a sparse file; the health check wants 10 GiB free
# The last are the local cluster's own processes.
_DAEMONS = ("munged", "slurmctld", "slurmscriptd", "slurmd", "hyperpod-ft")
# What a command line says about a process of a job; the first that is found counts.
_ROLES = (
    ("hyperpod_ft.job.supervisor", "supervisor"),
    ("hyperpod_ft.job.torchrun", "torchrun"),
    ("hyperpod_ft.job.health", "health check"),
    ("hyperpod_ft.job.node", "node program"),
    ("hyperpod_ft.job.fork_server", "fork server"),
    ("hyperpod_ft.stages.train", "rank"),
    ("hyperpod_ft.stages.", "stage"),
    ("slurm_script", "script"),
)


@dataclass(frozen=True)
class Process:
    """A process of a job: `role` as in the table of faults, `stage` of the run, `command` where no role is known."""

    pid: int
    role: str
    stage: str
    command: str = ""


@dataclass(frozen=True)
class SlurmJob:
    """A job as squeue lists it."""

    job_id: str
    state: str
    reason: str
    name: str

    @property
    def stage(self) -> str:
        return self.name.rpartition("-")[2]


class Site:
    """The cluster and the volume of one worker, below `directory`."""

    def __init__(self, directory: Path, shim_library: Path) -> None:
        self.directory = directory
        self.volume = directory / "volume"
        self.root = self.volume / "root"
        self.cluster = LocalCluster(directory / "cluster")
        for path in (self.volume, directory / "state"):
            path.mkdir(parents=True, exist_ok=True)
        self.shim = Shim(shim_library, directory / "control", self.root, self.root / "code")
        self.environment = {
            **os.environ,
            **self.cluster.environment(),
            **self.shim.environment,
            "PYTHONPATH": str(ROOT),
            "XDG_STATE_HOME": str(directory / "state"),
            LIMIT: str(HANG_S),
        }

    def open(self) -> None:
        """Mount the volume and start the cluster; what an earlier soak left is removed."""
        self.close()
        image = self.directory / "volume.ext4"
        with image.open("wb") as file:
            file.truncate(_VOLUME_BYTES)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(self.volume)], check=True)
        self.cluster.up(nodes=4, cpus=4, bound_to=os.getpid())

    def close(self) -> None:
        """Stop the cluster and give back the volume."""
        self.cluster.down()
        if self.volume.is_mount():
            subprocess.run(["umount", "--lazy", str(self.volume)], check=True)

    def command(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start a command of the kit."""
        return subprocess.Popen(
            [sys.executable, "-m", "hyperpod_ft", *arguments],
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def jobs(self, *options: str) -> list[SlurmJob] | None:
        """The jobs that have not ended, or those that `options` select; None when Slurm does not answer."""
        done = self._slurm("squeue", "--noheader", "--format=%i|%T|%r|%j", *options)
        if done is None:
            return None
        return [SlurmJob(*line.split("|", 3)) for line in done.splitlines()]

    def known_jobs(self) -> dict[str, str]:
        """The names of all jobs since the cluster was started, by id."""
        return {job.job_id: job.name for job in self.jobs("--states=all") or []}

    def resume_nodes(self) -> list[str]:
        """Have Slurm use nodes again that it has set aside, as an administrator would; returns their names."""
        listing = self._slurm("sinfo", "--noheader", "--Node", "--format=%N %T") or ""
        nodes = [node for node, state in map(str.split, listing.splitlines()) if state.startswith(("drain", "down"))]
        for node in nodes:
            self.scontrol("update", f"NodeName={node}", "State=RESUME")
        return nodes

    def scontrol(self, *arguments: str) -> None:
        self._slurm("scontrol", *arguments)

    def scancel(self, *arguments: str) -> None:
        self._slurm("scancel", *arguments)

    def processes(self) -> list[Process]:
        """The processes of all jobs, on all nodes."""
        watch = self.cluster.status().pid
        stages = {job.job_id: job.stage for job in self.jobs() or []}
        found = (_process(pid, stages) for pid in (descendants(watch) if watch else []))
        return [process for process in found if process]

    def is_orphan(self, pid: int) -> bool:
        """Whether this is a process whose parent has died: the local cluster has adopted it."""
        return pid in children(self.cluster.status().pid or 0)

    def strangers(self) -> list[str]:
        """Command lines of processes that have to do with the volume, of no job and no command of this program."""
        spared = {os.getpid(), *descendants(os.getpid())}
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            words = _command_line(int(entry.name))
            if int(entry.name) not in spared and str(self.root) in words:
                found.append(words)
        return found

    def wait_until_quiet(self, seconds: float) -> list[str]:
        """Wait until no process of a job is left; returns what is left after that time."""
        deadline = time.monotonic() + seconds
        while True:
            left = [f"{process.role} {process.pid}" for process in self.processes()] + self.strangers()
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.5)

    def _slurm(self, *arguments: str) -> str | None:
        environment = {**os.environ, **self.cluster.environment()}
        try:
            done = subprocess.run(
                arguments,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None
        return None if done.returncode else done.stdout


def read_json(path: Path) -> Any:
    """The JSON of a file; None when it is missing."""
    return json.loads(path.read_bytes()) if path.exists() else None


def _process(pid: int, stages: dict[str, str]) -> Process | None:
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    words = _command_line(pid)
    if name in _DAEMONS or not words:
        return None
    variables = dict(entry.split(b"=", 1) for entry in environment if b"=" in entry)
    stage = stages.get(variables.get(b"SLURM_JOB_ID", b"").decode(), "")
    if words.startswith("slurmstepd"):
        stage = stages.get(words.partition("[")[2].partition(".")[0], "")
        return Process(pid, "slurmstepd", stage)
    if name in ("srun", "squeue", "scontrol"):
        return Process(pid, "srun" if name == "srun" else "Slurm's clients", stage)
    if name.startswith("rank "):  # a fork: its command line is that of the fork server
        return Process(pid, "rank", stage)
    role = next((role for text, role in _ROLES if text in words), "")
    return Process(pid, role or "others", stage, "" if role else words[:80])


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
