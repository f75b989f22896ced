"""What the processes of a job agree on: its files in the run directory, its variables, the signals that end it, and
exit statuses.

The id in the names of files is the one that the job's script exports.

A container reads this module before it has the kit's environment: standard library and Python 3.8 only.
"""

import re
import signal
from pathlib import Path

JOB_ID = "HYPERPOD_FT_JOB_ID"
# When the job's script began: ISO 8601, UTC, whole seconds. A job that Slurm requeues begins again.
JOB_BEGAN = "HYPERPOD_FT_JOB_BEGAN"
# Set where a job has an interpreter of its own, such as a container's, which its stages use instead of the run's.
PYTHON = "HYPERPOD_FT_PYTHON"
# How many nodes a job has that may have fewer than its run wants.
NODES = "HYPERPOD_FT_NODES"
# Set for what runs in a container of a Slurm job, which lacks Slurm's programs: the first node's address, all names.
FIRST_ADDRESS, NODE_NAMES = "HYPERPOD_FT_FIRST_ADDRESS", "HYPERPOD_FT_NODE_NAMES"
# Holds the directory for the failures and node reports of one attempt.
ATTEMPT_DIRECTORY = "HYPERPOD_FT_ATTEMPT"
# Set where a job step has made earlier attempts: how many.
ATTEMPTS_BEFORE = "HYPERPOD_FT_ATTEMPTS_BEFORE"
# Of an attempt at training, a number higher than of earlier ones. Slurm numbers its job steps itself.
ATTEMPT_NUMBER = "HYPERPOD_FT_ATTEMPT_NUMBER"
# Set in a training job's containers: the names of the job's hosts, in order; this one's number; the seconds that the
# job has; and the module that runs a command on every host.
HOSTS, HOST_NUMBER = "HYPERPOD_FT_HOSTS", "HYPERPOD_FT_HOST_NUMBER"
MAX_RUNTIME, ON_EVERY_HOST = "HYPERPOD_FT_MAX_RUNTIME", "HYPERPOD_FT_ON_EVERY_HOST"
# Seconds between a training job's notice and its limit, if the limit is not short. An estimate: SageMaker may also
# count the start of the instances, which takes minutes.
_NOTICE_SECONDS = 900
BANNER = re.compile(r"== (\w+) job ")  # matches `banner`; its group is the stage


def script(run_directory: Path, stage: str) -> Path:
    """The script of a stage, which Slurm and containers run."""
    return run_directory / "sbatch" / f"{stage}.sbatch"


def log(run_directory: Path, stage: str, job_id: str) -> Path:
    """What a job prints: Slurm's `%x_%j.out`. The run's name is that of the directory above."""
    return Path(f"{run_directory}/logs/{run_directory.parent.name}-{stage}_{job_id}.out")


def hangs(run_directory: Path) -> Path:
    """A directory for each hang, with the stacks of all ranks."""
    return run_directory / "logs" / "hangs"


def slowest_ranks(run_directory: Path) -> Path:
    """Which rank worked longest, one JSON object for some dozens of steps: see runs/results/slowest_rank.py."""
    return run_directory / "slowest.jsonl"


def banner(stage: str, job_id: str) -> str:
    """How the line begins that a stage's script prints first, and the supervisor before each restart."""
    return f"== {stage} job {job_id}"


def exit_marker(run_directory: Path, stage: str, job_id: str) -> Path:
    """Holds the exit status that the stage's script, or the supervisor that replaced it, has left."""
    return run_directory / "exits" / f"{stage}_{job_id}"


# Slurm's notice of the time limit, and a container's own. Slurm sends it to the job's script (`--signal=B:USR1@...`);
# supervisor, srun and torchrun forward it. Training saves a checkpoint and ends.
NOTICE = signal.SIGUSR1
# What asks a training run to stop: the notice, or SIGTERM, which scancel sends and torchrun forwards.
STOP_SIGNALS = (NOTICE, signal.SIGTERM)
# Exit statuses, as a shell reports them, of processes that the notice, SIGTERM or SIGKILL ended.
NOTICE_STATUS = 128 + NOTICE
TERMINATED_STATUS = 128 + signal.SIGTERM
KILLED_STATUS = 128 + signal.SIGKILL


def shell_status(returncode: int) -> int:
    """The exit status that a shell reports for the return code of a subprocess: 128 + n for signal n."""
    return returncode if returncode >= 0 else 128 - returncode


def notice_seconds(max_runtime: float) -> float:
    """Seconds before its limit at which a training job saves: 15 minutes, or a fifth of the limit if that is less."""
    return min(_NOTICE_SECONDS, max_runtime / 5)
