"""Where a process of a job runs, and what is different there: a node of Slurm, a training job's container, or neither.

The programs of a job ask it; nothing else in them looks at the variables of Slurm or of a container.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hyperpod_ft.launch.slurm.client import Slurm
from hyperpod_ft.launch.slurm.site import HYPERPOD
from hyperpod_ft.runs import job_files

ContinuedBy = Literal["Slurm", "next job", "nothing"]
# The share of the time between the notice and the limit in which the ranks save a checkpoint. The rest, on Slurm:
# requeueing the job; in a container: pushing the checkpoint to the store, and the instances' start.
_SHARE_TO_SAVE_ON_SLURM = 0.8
_SHARE_TO_SAVE_IN_CONTAINER = 2 / 3


@dataclass(frozen=True)
class JobHost:
    """A host, and its place in the job. Without Slurm and outside a training job, this machine is the only one."""

    name: str  # in Slurm or in the training job, or else its host name
    number: int = 0  # among the hosts of the job, from 0
    nodes: int = 1
    step_number: int = 0  # of the job step; of a training job, of the attempt
    slurm_job: str = ""  # empty without Slurm
    slurm_restarts: int = 0  # how often Slurm has started the job again
    node_list: str = ""  # of the Slurm job, like node[1-4]
    hosts: tuple[str, ...] = ()  # of the training job, in order
    max_runtime: int = 0  # seconds that this container of the training job has
    program: str = ""  # the module that runs a command on every host of the training job; empty where there is one
    continued_by: ContinuedBy = "nothing"  # what continues the work after the job's time limit
    # Whether no one but the job's first process is signalled. Slurm sends SIGTERM to every process of a job.
    only_sender: bool = False
    seconds_to_end: int = 45  # that the ranks have to save after SIGTERM: more than Slurm's KillWait

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "JobHost":
        if hosts := tuple(environment.get(job_files.HOSTS, "").split()):
            return cls(
                name=hosts[int(environment[job_files.HOST_NUMBER])],
                number=int(environment[job_files.HOST_NUMBER]),
                nodes=len(hosts),
                step_number=int(environment.get(job_files.ATTEMPT_NUMBER, "0")),
                hosts=hosts,
                max_runtime=int(environment.get(job_files.MAX_RUNTIME, "0")),
                program=environment.get(job_files.ON_EVERY_HOST, ""),
                continued_by="next job",
                only_sender=True,
                seconds_to_end=90,  # of the 120 s between SageMaker's SIGTERM and SIGKILL
            )
        return cls(
            name=environment.get("SLURMD_NODENAME") or os.uname().nodename,
            number=int(environment.get("SLURM_NODEID", "0")),
            nodes=int(environment.get("SLURM_NNODES", "1")),
            step_number=int(environment.get("SLURM_STEP_ID", "0")),
            slurm_job=environment.get("SLURM_JOB_ID", ""),
            slurm_restarts=int(environment.get("SLURM_RESTART_COUNT", "0")),
            node_list=environment.get("SLURM_JOB_NODELIST", ""),
            continued_by="Slurm" if environment.get("SLURM_JOB_ID") else "nothing",
        )

    @property
    def is_first_start(self) -> bool:
        """Whether what is recorded of the job's id is of an earlier job. The names of training jobs are used once."""
        return not self.slurm_restarts and not self.hosts

    @property
    def attempt_number(self) -> int:
        """The same on all hosts of an attempt, and another one for each attempt."""
        return 101 * int(self.slurm_job or 0) + 13 * self.slurm_restarts + self.step_number

    def meeting_place(self) -> str:
        """The address at which the hosts meet; empty for a machine alone. Raises UserError when Slurm does not know it.

        Slurm is asked for the first node in every step: a node that HyperPod has replaced has another address.
        """
        if self.hosts:
            return self.hosts[0]
        return Slurm().first_node_address(self.slurm_job) if self.slurm_job else ""

    def host_names(self) -> Sequence[str]:
        """All hosts of the job; empty when Slurm does not answer."""
        return self.hosts or Slurm().host_names(self.node_list)

    def on_every_host(self, command: list[str], stage: str, run_directory: str) -> list[str]:
        """What runs a command on every host. On Slurm, the script has put srun before it.

        Does not return on the other hosts of a training job: this process becomes the command.
        """
        if self.hosts and self.number:
            os.execvp(command[0], command)  # noqa: S606 - no shell is meant
        return [sys.executable, "-m", self.program, stage, run_directory, *command] if self.program else command

    def seconds_to_save(self, slurm_notice: float) -> float:
        """How long after the notice the supervisor waits for the checkpoint.

        `slurm_notice`: seconds between Slurm's notice and the limit.
        """
        if self.max_runtime:
            return _SHARE_TO_SAVE_IN_CONTAINER * job_files.notice_seconds(self.max_runtime)
        return _SHARE_TO_SAVE_ON_SLURM * slurm_notice

    def replacement(self, node: str) -> str:
        """How the job gets another node: HyperPod's replacement, other instances, or keeping Slurm from using it."""
        if self.hosts:
            return "have SageMaker start the job on other instances: hyperpod-ft resume"
        if HYPERPOD.is_dir():
            return f'have the node replaced: scontrol update node={node} state=fail reason="Action:Replace"'
        return f'drain the node: scontrol update nodename={node} state=drain reason="hyperpod-ft health"'
