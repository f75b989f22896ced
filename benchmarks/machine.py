"""The circumstances of a measurement: time, machine and file system."""

import os
import platform
import time
from pathlib import Path
from typing import Any


def facts(directory: Path) -> dict[str, Any]:
    """Facts for a results file; `directory` is where data is written."""
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release().partition("-")[0],
        "file_system": _file_system(directory),
        "python": platform.python_version(),
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _file_system(directory: Path) -> str:
    """The type of the mount that holds a directory: the nearest mount point above it."""
    mounts = (line.split() for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines())
    above = {Path(point): kind for _, point, kind, *_ in mounts}
    whole = directory.resolve()
    return next(above[parent] for parent in (whole, *whole.parents) if parent in above)
