"""What this process may use of the machine."""

import os


def usable_cpus() -> int:
    """CPUs this job may use: Slurm's share of the node where the system tells, else all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
