"""What a SageMaker training job's containers and the programs that create and read the job agree on.

A container reads this module before it has the kit's environment: standard library and Python 3.8 only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

CODE, FSX = "code", "fsx"  # channels, below /opt/ml/input/data
ENTRY = "entry.py"  # in channel `code`: what a container starts

# Holds the interpreter of the container, for the scripts of the stages.
CONTAINER_PYTHON = "HYPERPOD_FT_PYTHON"
MAX_RUNTIME = "HYPERPOD_FT_MAX_RUNTIME"

# Seconds between the notice and the job's limit, if the limit is not short. An estimate: SageMaker also counts the
# start of the instances, which takes minutes.
_NOTICE_SECONDS = 900
# The share of the time between the notice and the limit in which the ranks save a checkpoint. The rest, on Slurm:
# requeueing the job; in a container: pushing the checkpoint to the store, and the instances' start.
_SHARE_TO_SAVE_ON_SLURM = 0.8
_SHARE_TO_SAVE_IN_CONTAINER = 2 / 3


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
        """Read a job's description or SageMaker's file. Raises TypeError when one is missing."""
        return cls(**{field.name: given[field.name] for field in fields(cls) if field.name in given})

    def as_strings(self) -> dict[str, str]:
        """The hyperparameters of CreateTrainingJob, without the empty ones."""
        return {field.name: text for field in fields(self) if (text := getattr(self, field.name))}


def notice_seconds(max_runtime: float) -> float:
    """Seconds before its limit at which a training job saves: 15 minutes, or a fifth of the limit if that is less."""
    return min(_NOTICE_SECONDS, max_runtime / 5)


def seconds_to_save(slurm_notice: float, max_runtime: float = 0) -> float:
    """How long after the notice the supervisor waits for the checkpoint.

    `slurm_notice`: seconds between Slurm's notice and the limit. `max_runtime`: of a training job; 0 on Slurm.
    """
    if max_runtime:
        return _SHARE_TO_SAVE_IN_CONTAINER * notice_seconds(max_runtime)
    return _SHARE_TO_SAVE_ON_SLURM * slurm_notice
