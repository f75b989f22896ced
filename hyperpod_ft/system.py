"""The part of the machine that this process may use."""

import os


def usable_cpus() -> int:
    """CPUs this process may use: its share of the node where the system reports one, all CPUs elsewhere."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
