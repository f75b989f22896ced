"""The job step that a process belongs to, from the variables that Slurm sets."""

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class SlurmStep:
    """The Slurm job step of this process. Without Slurm: no job, and this machine is the only node."""

    job_id: str  # empty without Slurm
    restarts: int  # how often Slurm has started the job again
    number: int  # of the step within the job
    node: str  # this node's name in Slurm, or else its host name
    node_number: int  # of this node within the step
    nodes: int
    node_list: str  # of the job, like node[1-4]

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "SlurmStep":
        return cls(
            job_id=environment.get("SLURM_JOB_ID", ""),
            restarts=int(environment.get("SLURM_RESTART_COUNT", "0")),
            number=int(environment.get("SLURM_STEP_ID", "0")),
            node=environment.get("SLURMD_NODENAME") or os.uname().nodename,
            node_number=int(environment.get("SLURM_NODEID", "0")),
            nodes=int(environment.get("SLURM_NNODES", "1")),
            node_list=environment.get("SLURM_JOB_NODELIST", ""),
        )
