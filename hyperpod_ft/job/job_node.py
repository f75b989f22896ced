"""This node of a job: from Slurm's variables, or from those of a SageMaker training job."""

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
class JobNode:
    """A node, and its place in the job. Without Slurm and outside a training job, this machine is the only one."""

    slurm_job: str  # empty without Slurm
    slurm_restarts: int  # how often Slurm has started the job again
    step_number: int  # of the job step; of a training job, of the attempt
    name: str  # in Slurm or in the training job, or else its host name
    number: int  # of this node among them, from 0
    nodes: int
    node_list: str = ""  # of the Slurm job, like node[1-4]
    hosts: tuple[str, ...] = ()  # of the training job, in order
    max_runtime: int = 0  # seconds that SageMaker gives the training job

    @property
    def in_training_job(self) -> bool:
        return bool(self.hosts)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> JobNode:
        if hosts := tuple(environment.get(HOSTS, "").split()):
            place = int(environment[HOST_NUMBER])
            attempt = int(environment.get(ATTEMPT_NUMBER, "0"))
            limit = int(environment.get(MAX_RUNTIME, "0"))
            return cls("", 0, attempt, hosts[place], place, len(hosts), hosts=hosts, max_runtime=limit)
        return cls(
            slurm_job=environment.get("SLURM_JOB_ID", ""),
            slurm_restarts=int(environment.get("SLURM_RESTART_COUNT", "0")),
            step_number=int(environment.get("SLURM_STEP_ID", "0")),
            name=environment.get("SLURMD_NODENAME") or os.uname().nodename,
            number=int(environment.get("SLURM_NODEID", "0")),
            nodes=int(environment.get("SLURM_NNODES", "1")),
            node_list=environment.get("SLURM_JOB_NODELIST", ""),
        )
