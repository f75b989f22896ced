"""Find and kill processes of a local cluster that outlived its daemons."""

import os
import signal
from contextlib import suppress
from pathlib import Path

from hyperpod_ft.processes import all_pids, ancestors


def kill_strays(conf: Path) -> None:
    """SIGKILL job processes of the cluster of `conf` that outlived watch and guards (`pkill -9 -f` hits both).

    A step daemon has slurmd's environment; a task has the SLURM_CONF it was submitted with, and SLURMD_NODENAME,
    which nothing but a step daemon sets. This process and its ancestors are spared.
    """
    spared = ancestors(os.getpid())
    setting = b"SLURM_CONF=" + os.fsencode(conf)
    for pid in all_pids():
        if pid in spared:
            continue
        with suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            is_task = any(item.startswith(b"SLURMD_NODENAME=") for item in environment)
            is_step_daemon = Path(f"/proc/{pid}/comm").read_bytes().startswith(b"slurmstepd")
            if setting in environment and (is_task or is_step_daemon):
                os.kill(pid, signal.SIGKILL)
