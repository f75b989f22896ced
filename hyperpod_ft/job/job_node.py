"""This node of a job: from Slurm's variables, or from those that a launcher without Slurm sets for each host."""

from __future__ import annotations  # also imported with Python 3.8, in training jobs

import os
from collections.abc import Mapping
from dataclasses import dataclass

# Holds the directory for the failures and node reports of one attempt.
ATTEMPT_DIRECTORY = "HYPERPOD_FT_ATTEMPT"
# Set without Slurm, as in a training job's containers: the names of the job's hosts, in order; this one's number; of an
# attempt at training, a number higher than of earlier ones; and the seconds that the job has.
HOSTS, HOST_NUMBER, ATTEMPT_NUMBER = "HYPERPOD_FT_HOSTS", "HYPERPOD_FT_HOST_NUMBER", "HYPERPOD_FT_ATTEMPT_NUMBER"
MAX_RUNTIME = "HYPERPOD_FT_MAX_RUNTIME"

# Seconds between a training job's notice and its limit, if the limit is not short. An estimate: SageMaker may also
# count the start of the instances, which takes minutes.
_NOTICE_SECONDS = 900
# The share of the time between the notice and the limit in which the ranks save a checkpoint. The rest, on Slurm:
# requeueing the job; in a container: pushing the checkpoint to the store, and the instances' start.
_SHARE_TO_SAVE_ON_SLURM = 0.8
_SHARE_TO_SAVE_IN_CONTAINER = 2 / 3


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
    max_runtime: int = 0  # seconds that this container of the training job has

    @property
    def in_training_job(self) -> bool:
        return bool(self.hosts)

    def seconds_to_save(self, slurm_notice: float) -> float:
        """How long after the notice the supervisor waits for the checkpoint.

        `slurm_notice`: seconds between Slurm's notice and the limit.
        """
        if self.max_runtime:
            return _SHARE_TO_SAVE_IN_CONTAINER * notice_seconds(self.max_runtime)
        return _SHARE_TO_SAVE_ON_SLURM * slurm_notice

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


def notice_seconds(max_runtime: float) -> float:
    """Seconds before its limit at which a training job saves: 15 minutes, or a fifth of the limit if that is less."""
    return min(_NOTICE_SECONDS, max_runtime / 5)
