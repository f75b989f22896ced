"""The signals that end a job, and the exit statuses that they leave.

A container reads this module before it has the kit's environment: standard library and Python 3.8 only.
"""

import signal

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
