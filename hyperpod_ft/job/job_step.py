"""The nodes on which a job started this process: from Slurm's variables, or from those of a SageMaker training job."""

from __future__ import annotations  # also imported with Python 3.8, in training jobs

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hyperpod_ft.runs.container import MAX_RUNTIME

# Holds the directory for the failures and node reports of one attempt.
ATTEMPT_DIRECTORY = "HYPERPOD_FT_ATTEMPT"
# Set in a training job's containers by hyperpod_ft.job.sagemaker: the names of its hosts, in order; this one's number;
# and of an attempt at training, a number higher than of earlier ones.
HOSTS, HOST_NUMBER, ATTEMPT_NUMBER = "HYPERPOD_FT_HOSTS", "HYPERPOD_FT_HOST_NUMBER", "HYPERPOD_FT_ATTEMPT_NUMBER"


@dataclass(frozen=True)
class JobStep:
    """The job step of this process. Without Slurm and outside a training job, this machine is the only node."""

    slurm_job: str  # empty without Slurm
    restarts: int  # how often Slurm has started the job again
    number: int  # of the step within the job
    node: str  # this node's name in Slurm or in the training job, or else its host name
    node_number: int  # of this node within the step
    nodes: int
    node_list: str = ""  # of the Slurm job, like node[1-4]
    hosts: tuple[str, ...] = ()  # of the training job, in order
    max_runtime: int = 0  # seconds that SageMaker gives the training job

    @property
    def in_training_job(self) -> bool:
        return bool(self.hosts)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> JobStep:
        if hosts := tuple(environment.get(HOSTS, "").split()):
            place = int(environment[HOST_NUMBER])
            attempt = int(environment.get(ATTEMPT_NUMBER, "0"))
            limit = int(environment.get(MAX_RUNTIME, "0"))
            return cls("", 0, attempt, hosts[place], place, len(hosts), hosts=hosts, max_runtime=limit)
        return cls(
            slurm_job=environment.get("SLURM_JOB_ID", ""),
            restarts=int(environment.get("SLURM_RESTART_COUNT", "0")),
            number=int(environment.get("SLURM_STEP_ID", "0")),
            node=environment.get("SLURMD_NODENAME") or os.uname().nodename,
            node_number=int(environment.get("SLURM_NODEID", "0")),
            nodes=int(environment.get("SLURM_NNODES", "1")),
            node_list=environment.get("SLURM_JOB_NODELIST", ""),
        )
