"""What a SageMaker training job's containers and the programs that create and read the job agree on.

A container reads this module before it has the kit's environment: standard library and Python 3.8 only.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

CODE, FSX = "code", "fsx"  # channels, below /opt/ml/input/data
ENTRY = "entry.py"  # in channel `code`: what a container starts

# Holds the interpreter of the container, for the scripts of the stages.
CONTAINER_PYTHON = "HYPERPOD_FT_PYTHON"
JOB_ID = "HYPERPOD_FT_JOB_ID"
MAX_RUNTIME = "HYPERPOD_FT_MAX_RUNTIME"

# Slurm's notice of the time limit, and a container's own. Slurm sends it to the job's script (`--signal=B:USR1@...`);
# supervisor, srun and torchrun forward it. Training saves a checkpoint and ends.
NOTICE = signal.SIGUSR1
# Exit statuses, as a shell reports them, of processes that the notice, SIGTERM or SIGKILL ended.
NOTICE_STATUS = 128 + NOTICE
TERMINATED_STATUS = 128 + signal.SIGTERM
KILLED_STATUS = 128 + signal.SIGKILL

# Seconds between the notice and the job's limit, if the limit is not short. An estimate: SageMaker also counts the
# start of the instances, which takes minutes.
_NOTICE_SECONDS = 900
# The share of it in which the ranks save a checkpoint. The rest: pushing it to the store, and the instances' start.
_SHARE_TO_SAVE = 2 / 3


@dataclass(frozen=True)
class Hyperparameters:
    """The launcher's parameters for a container; SageMaker requires strings."""

    job: str  # the job's name
    group: str  # of stages, for people who read the job's description
    stages: str  # to run, in order, separated by spaces
    root: str  # cluster.root: a link to channel `fsx`, or with `store` to a directory of the container
    run_directory: str
    max_runtime: str  # seconds that SageMaker gives the job
    python: str = ""  # interpreter of the stages, if the image has one
    pins: str = ""  # otherwise: requirements file below the code, for an interpreter of the container
    store: str = ""  # S3 prefix with the same tree, for jobs without a file system

    @classmethod
    def read(cls, given: Mapping[str, str]) -> Hyperparameters:
        """From a job's description or SageMaker's file. Raises TypeError when one is missing."""
        return cls(**{field.name: given[field.name] for field in fields(cls) if field.name in given})

    def texts(self) -> dict[str, str]:
        """The hyperparameters of CreateTrainingJob, without the empty ones."""
        return {field.name: text for field in fields(self) if (text := getattr(self, field.name))}


def notice_seconds(max_runtime: float) -> float:
    """Seconds before its limit at which a training job saves: 15 minutes, or a fifth of the limit if that is less."""
    return min(_NOTICE_SECONDS, max_runtime / 5)


def seconds_to_save(max_runtime: float) -> float:
    """How long after the notice a training job waits for the checkpoint."""
    return _SHARE_TO_SAVE * notice_seconds(max_runtime)


def script(run_directory: Path, stage: str) -> Path:
    """The script of a stage, which Slurm and containers run."""
    return run_directory / "sbatch" / f"{stage}.sbatch"


def log(run_directory: Path, stage: str, job_id: str) -> Path:
    """What a job prints: Slurm's `%x_%j.out`. The run's name is that of the directory above."""
    return run_directory / "logs" / f"{run_directory.parent.name}-{stage}_{job_id}.out"


def exit_marker(run_directory: Path, stage: str, job_id: str) -> Path:
    """Holds the exit status that the stage's script, or the supervisor that replaced it, has left."""
    return run_directory / "exits" / f"{stage}_{job_id}"
