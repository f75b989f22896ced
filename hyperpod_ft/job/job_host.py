"""Where a process of a job runs, and what is different there: a node of Slurm, a training job's container, or neither.

The programs of a job ask it; nothing else in them looks at the variables of Slurm or of a container.
"""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from hyperpod_ft.digests import text_sha256
from hyperpod_ft.launch.slurm.client import Slurm
from hyperpod_ft.launch.slurm.site import HYPERPOD
from hyperpod_ft.runs import job_files
from hyperpod_ft.runs.jobs import own_job_id

# For the rendezvous of ranks, below Linux's ephemeral ports. The lifecycle scripts reserve them on nodes
# (provision/steps/limits.py).
MASTER_PORTS = range(10_000, 20_000)
_ATTEMPTS_IN_A_STEP = 1000  # and more than that
ContinuedBy = Literal["Slurm", "next job", "nothing"]


@dataclass(frozen=True)
class JobHost:
    """A host, and its place in the job. This one is a machine alone; the others say what is different there."""

    name: str
    number: int = 0  # among the hosts of the job, from 0
    nodes: int = 1
    attempt: int = 0  # grows with every attempt of the job: with its job steps, and with the attempts in one

    continued_by: ClassVar[ContinuedBy] = "nothing"  # what continues the work after the job's time limit
    # Whether no one but the job's first process is signalled. Slurm sends SIGTERM to every process of a job.
    only_sender: ClassVar[bool] = False
    seconds_to_end: ClassVar[int] = 45  # that the ranks have to save after SIGTERM: more than Slurm's KillWait

    @property
    def is_first_start(self) -> bool:
        """Whether what is recorded of the job's id is of an earlier job."""
        return True

    @property
    def attempt_number(self) -> int:
        """The same on all hosts of an attempt, and another one for each attempt."""
        return self.attempt

    def meeting_place(self) -> str:
        """The address at which the hosts meet; empty for a machine alone. Raises UserError where Slurm gives none."""
        return ""

    def memory(self, run_directory: Path) -> Path:
        """The directory in this host's memory for what the job keeps there of a run."""
        job = text_sha256(f"{run_directory} {own_job_id()}")[:12]
        return Path("/dev/shm", f"hyperpod-ft-{os.getuid()}-{job}", self.name)  # noqa: S108 - of this user alone

    def host_names(self) -> Sequence[str]:
        """All hosts of the job; empty when Slurm does not answer."""
        return (self.name,)

    def answers(self) -> dict[str, str]:
        """Variables with what only this process can ask for, for hosts in containers. Raises UserError as above."""
        return {}

    def on_every_host(self, command: list[str], stage: str, run_directory: str) -> list[str]:
        """What runs a command on every host. On Slurm, the script has put srun before it."""
        return command

    @property
    def passes_words(self) -> bool:
        """Whether what runs a command on every host passes on its own standard input."""
        return True

    def idle_nodes(self) -> int:
        """Nodes that a job like this one could have besides its own."""
        return 0

    def seconds_to_save(self, slurm_notice: float) -> float:
        """How long after the notice the supervisor waits for the checkpoint; then Slurm requeues the job.

        `slurm_notice`: seconds between Slurm's notice and the limit.
        """
        return 0.8 * slurm_notice

    def replacement(self, node: str) -> str:
        """What to do about a faulty host. Over ssh, a node of a cluster is in no job."""
        if HYPERPOD.is_dir() or shutil.which("scontrol"):
            return replacement_on_slurm(node)
        return "repair this machine, or set cluster.instance_type to a type like it"


@dataclass(frozen=True)
class SlurmHost(JobHost):
    """A node in a job of Slurm."""

    job_id: str = ""
    restarts: int = 0  # how often Slurm has started the job again
    node_list: str = ""  # like node[1-4]
    partition: str = ""
    reserved: bool = False  # whether it runs in a reservation
    first_address: str = ""  # in a container, as are the names: Slurm's answers outside
    names: tuple[str, ...] = ()

    continued_by = "Slurm"

    @property
    def is_first_start(self) -> bool:
        return not self.restarts

    @property
    def attempt_number(self) -> int:
        return 101 * int(self.job_id) + 13 * self.restarts + self.attempt

    def meeting_place(self) -> str:
        """Slurm is asked in every step for the first node: one that HyperPod has replaced has another address."""
        return self.first_address or Slurm().first_node_address(self.job_id)

    def host_names(self) -> Sequence[str]:
        return self.names or Slurm().host_names(self.node_list)

    def answers(self) -> dict[str, str]:
        asked = replace(self, first_address="", names=())
        return {
            job_files.FIRST_ADDRESS: asked.meeting_place(),
            job_files.NODE_NAMES: " ".join(asked.host_names()),
        }

    def idle_nodes(self) -> int:
        return Slurm().idle_nodes(self.partition, reserved=self.reserved)

    def replacement(self, node: str) -> str:
        return replacement_on_slurm(node)


@dataclass(frozen=True)
class TrainingJobHost(JobHost):
    """A container of a training job."""

    hosts: tuple[str, ...] = ()  # in order
    max_runtime: int = 0  # seconds that this container has
    program: str = ""  # the module that runs a command on every host

    continued_by = "next job"
    only_sender = True
    seconds_to_end = 90  # of the 120 s between SageMaker's SIGTERM and SIGKILL

    @property
    def is_first_start(self) -> bool:
        return False  # the names of training jobs are used once

    def meeting_place(self) -> str:
        return self.hosts[0]

    def host_names(self) -> Sequence[str]:
        return self.hosts

    def on_every_host(self, command: list[str], stage: str, run_directory: str) -> list[str]:
        """Does not return on the other hosts: this process becomes the command."""
        if self.number:
            os.execvp(command[0], command)  # noqa: S606 - no shell is meant
        return [sys.executable, "-m", self.program, stage, run_directory, *command] if self.program else command

    @property
    def passes_words(self) -> bool:
        return not self.program

    def seconds_to_save(self, slurm_notice: float) -> float:
        """The rest is for pushing the checkpoint to the store, and for the instances' start."""
        return 2 / 3 * job_files.notice_seconds(self.max_runtime)

    def replacement(self, node: str) -> str:
        return "have SageMaker start the job on other instances: hyperpod-ft resume"


def port_after(port: int, attempts: int) -> int:
    """The port of an attempt, from that of the first one of its job step."""
    return MASTER_PORTS[(port - MASTER_PORTS.start + attempts) % len(MASTER_PORTS)]


def replacement_on_slurm(node: str) -> str:
    """How a job gets another node: HyperPod's replacement, or keeping Slurm from using this one."""
    if HYPERPOD.is_dir():
        return f'have the node replaced: scontrol update node={node} state=fail reason="Action:Replace"'
    return f'drain the node: scontrol update nodename={node} state=drain reason="hyperpod-ft health"'


def this_host(environment: Mapping[str, str] = os.environ) -> JobHost:
    """The host that this process runs on, and its place in the job that it belongs to."""
    before = int(environment.get(job_files.ATTEMPTS_BEFORE, "0"))
    if hosts := tuple(environment.get(job_files.HOSTS, "").split()):
        number = int(environment[job_files.HOST_NUMBER])
        return TrainingJobHost(
            name=hosts[number],
            number=number,
            nodes=len(hosts),
            attempt=int(environment.get(job_files.ATTEMPT_NUMBER, "0")) + before,
            hosts=hosts,
            max_runtime=int(environment[job_files.MAX_RUNTIME]),
            program=environment.get(job_files.ON_EVERY_HOST, ""),
        )
    if job_id := environment.get("SLURM_JOB_ID"):
        return SlurmHost(
            name=environment.get("SLURMD_NODENAME") or os.uname().nodename,
            number=int(environment.get("SLURM_NODEID", "0")),
            nodes=int(environment.get("SLURM_NNODES", "1")),
            attempt=_ATTEMPTS_IN_A_STEP * int(environment.get("SLURM_STEP_ID", "0")) + before,
            job_id=job_id,
            restarts=int(environment.get("SLURM_RESTART_COUNT", "0")),
            node_list=environment.get("SLURM_JOB_NODELIST", ""),
            partition=environment.get("SLURM_JOB_PARTITION", ""),
            reserved="SLURM_JOB_RESERVATION" in environment,
            first_address=environment.get(job_files.FIRST_ADDRESS, ""),
            names=tuple(environment.get(job_files.NODE_NAMES, "").split()),
        )
    return JobHost(os.uname().nodename, attempt=int(environment.get(job_files.ATTEMPT_NUMBER, "0")) + before)
