"""The files of a job in its run directory. The id in their names is the one that the job's script exports.

A container reads this module before it has the kit's environment: standard library and Python 3.8 only.
"""

import re
from pathlib import Path

JOB_ID = "HYPERPOD_FT_JOB_ID"
# Set where a job has an interpreter of its own, such as a container's, which its stages use instead of the run's.
PYTHON = "HYPERPOD_FT_PYTHON"
BANNER = re.compile(r"== (\w+) job ")  # matches `banner`; its group is the stage


def script(run_directory: Path, stage: str) -> Path:
    """The script of a stage, which Slurm and containers run."""
    return run_directory / "sbatch" / f"{stage}.sbatch"


def log(run_directory: Path, stage: str, job_id: str) -> Path:
    """What a job prints: Slurm's `%x_%j.out`. The run's name is that of the directory above."""
    return Path(f"{run_directory}/logs/{run_directory.parent.name}-{stage}_{job_id}.out")


def banner(stage: str, job_id: str) -> str:
    """How the line begins that a stage's script prints first, and the supervisor before each restart."""
    return f"== {stage} job {job_id}"


def exit_marker(run_directory: Path, stage: str, job_id: str) -> Path:
    """Holds the exit status that the stage's script, or the supervisor that replaced it, has left."""
    return run_directory / "exits" / f"{stage}_{job_id}"
