"""What tests of local clusters ask of one: Slurm's clients, its processes, a job that escapes."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from hyperpod_ft.localcluster import LocalCluster
from hyperpod_ft.processes import ProcessIdentity
from tests.waiting import wait_for

# Leaves its session and its parent, as a daemon does, and says which process it became.
ESCAPEE = "setsid sh -c 'sleep 300 & echo $! > \"$0\"' {file} </dev/null >/dev/null 2>&1 &"


def run(cluster: LocalCluster, *argv: str, cwd: Path | None = None) -> str:
    """A Slurm client's output; it must succeed within 300 s."""
    return subprocess.run(
        ["timeout", "300", *argv],
        env={**os.environ, **cluster.environment()},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def start_python(code: str, *arguments: object) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdin=subprocess.DEVNULL)


def job_state(cluster: LocalCluster, job: str) -> str:
    fields = run(cluster, "scontrol", "show", "job", "-o", job).split()
    return next(field.partition("=")[2] for field in fields if field.startswith("JobState="))


def processes_of(cluster: LocalCluster) -> list[str]:
    """Every process with the cluster's SLURM_CONF: watch, guards, daemons, step daemons, tasks, escapees."""
    setting = f"SLURM_CONF={cluster.conf}\0".encode()
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if setting in (directory / "environ").read_bytes():
                found.append(f"{directory.name} {(directory / 'comm').read_text().strip()}")
        except OSError:
            continue
    return found


def command_line(pid: int) -> str:
    """The arguments of a process, each ended by a zero byte; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def is_unlocked(cluster: LocalCluster) -> bool:
    """Whether no starter, watch or guard holds the cluster's lock, not even one that was just forked."""
    lock = cluster._runtime.try_lock()
    if lock:
        lock.close()
    return lock is not None


def assert_gone(cluster: LocalCluster) -> None:
    assert processes_of(cluster) == []
    assert not cluster.conf.parent.exists()
    assert not cluster.status().running


def submit_escaping_job(cluster: LocalCluster, directory: Path) -> ProcessIdentity:
    """Start a job on two nodes, one process of which escapes its session and parent. Returns that process."""
    file = directory / "escapee"
    script = f"{ESCAPEE.format(file=file)} srun -N2 sleep 300 & wait"
    run(cluster, "sbatch", "-N2", "-o", str(directory / "out"), "--wrap", script, cwd=directory)
    wait_for(lambda: file.exists() and file.read_text().endswith("\n"))
    wait_for(lambda: sum(" sleep" in process for process in processes_of(cluster)) == 3)
    identity = ProcessIdentity.of(int(file.read_text()))
    assert identity is not None
    return identity
