"""The files of one local cluster, and the control socket of the watch over its daemons.

It has two directories. `directory`, chosen by the user, has the logs and the lock. `path`, a short private name under
/tmp derived from it, has what Slurm and munge name and bind (Unix sockets are limited to 107 bytes, slurm.conf does
not allow spaces); it exists only while the cluster runs. Anyone may make a directory there, so one counts only if it is
this user's alone.
"""

import fcntl
import getpass
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

from hyperpod_ft.errors import UserError
from hyperpod_ft.localcluster.daemons import WatchSpec
from hyperpod_ft.localcluster.ports import PortBlock
from hyperpod_ft.localcluster.programs import Programs
from hyperpod_ft.localcluster.slurm_conf import ClusterSpec, render_cgroup_conf, render_slurm_conf
from hyperpod_ft.processes import ProcessIdentity, all_pids, ancestors

ANSWER_SECONDS = 60.0
_PATH = re.compile(r"/tmp/hyperpod-ft-\d+-([0-9a-f]{12})/slurm\.conf")  # noqa: S108 - as below


def runtime_path(name: str) -> Path:
    """Where Slurm's files of this user's local cluster of that name are while it runs."""
    return Path(f"/tmp/hyperpod-ft-{os.getuid()}-{name}")  # noqa: S108 - made 0700, ignored if not ours


def name_of(conf: str) -> str:
    """The name of the local cluster with this slurm.conf; empty for any other Slurm."""
    found = _PATH.fullmatch(conf)
    return found[1] if found else ""


def running_conf(name: str) -> Path | None:
    """The slurm.conf of this user's local cluster of that name; None while it is not up.

    Slurm's programs load what a slurm.conf names, so one that another user could have written does not count.
    """
    conf = runtime_path(name) / "slurm.conf"
    return conf if _is_ours(conf.parent) and conf.exists() else None


def _is_ours(directory: Path) -> bool:
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


class Runtime:
    """The files of one local cluster, whether it runs or not."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self.name = hashlib.sha256(os.fsencode(self.directory.resolve())).hexdigest()[:12]
        self.path = runtime_path(self.name)
        self.conf = self.path / "slurm.conf"
        self.logs = self.directory / "logs"

    def try_lock(self) -> IO[bytes] | None:
        """The directory's lock, held by whoever starts, runs or clears the cluster; the kernel releases it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        lock = (self.directory / "lock").open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return None
        return lock

    def clear(self) -> None:
        """Remove the leftovers of an earlier cluster. Only with the lock: then no watch and no guard is alive."""
        kill_strays(self.conf)
        if os.path.lexists(self.path) and not _is_ours(self.path):
            raise UserError(f"{self.path} belongs to another user", "remove it, or use another directory")
        if self.path.exists():
            shutil.rmtree(self.path)

    def next_job_id(self, ports: PortBlock) -> int:
        """The first job id, from a range that no earlier start here and no other running cluster uses.

        Run records outlive a cluster and name jobs by number; and jobs derive their rendezvous port from it, so
        the jobs of two clusters on one machine must differ.
        """
        counter = self.directory / "starts"
        starts = int(counter.read_text() or 0) if counter.exists() else 0
        counter.write_text(str(starts + 1))
        return 1 + 100 * ports.index + 20_000 * (starts % 3000)  # Slurm's largest is 67,043,328

    def create(self, spec: ClusterSpec, programs: Programs) -> None:
        """Write the files that the daemons read."""
        self.path.mkdir(mode=0o700)  # fails if another process has created it
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir()
        (self.path / "logs").symlink_to(self.logs, target_is_directory=True)
        (self.path / "state").mkdir()
        for name in spec.node_names:
            (self.path / "spool" / name).mkdir(parents=True)
        (self.path / "munge.key").touch(mode=0o600)
        (self.path / "munge.key").write_bytes(os.urandom(128))
        (self.path / "cluster.json").write_text(json.dumps(asdict(spec)))
        host = socket.gethostname().partition(".")[0]
        self.conf.write_text(render_slurm_conf(spec, self.path, getpass.getuser(), host))
        (self.path / "cgroup.conf").write_text(render_cgroup_conf(programs.version))

    def spec(self) -> ClusterSpec:
        """The spec of the running cluster."""
        return ClusterSpec.from_json((self.path / "cluster.json").read_text())

    def start_watch(
        self, spec: ClusterSpec, programs: Programs, held_fds: tuple[int, ...], owner: ProcessIdentity | None
    ) -> bool:
        """Start the watch over the daemons, which answers `ask`. False if it cannot start."""
        starter = ProcessIdentity.of(os.getpid())
        assert starter is not None
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control,
            (self.logs / "daemons.log").open("ab") as log,
        ):
            control.bind(str(self.path / "control"))
            control.listen(16)
            watch = WatchSpec(
                runtime=str(self.path),
                control_fd=control.fileno(),
                held_fds=held_fds,
                daemons=self._daemons(spec, programs),
                controller_port=spec.ports[0],
                starter=starter,
                owner=owner,
            )
            (self.path / "watch.json").write_text(json.dumps(asdict(watch)))
            # If this runs in a Slurm job, the daemons must not inherit its variables.
            inherited = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
            answer = subprocess.run(
                [sys.executable, "-m", "hyperpod_ft.localcluster", str(self.path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**inherited, "SLURM_CONF": str(self.conf)},
                cwd="/",
                start_new_session=True,
                pass_fds=(control.fileno(), *held_fds),
                check=False,
            )
        return answer.returncode == 0

    def ask(self, words: str) -> str | None:
        """Send the daemon watch a command and return its answer; None when it does not run."""
        if not _is_ours(self.path):
            return None
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
            control.settimeout(ANSWER_SECONDS)
            try:
                control.connect(str(self.path / "control"))
                control.sendall(words.encode())
                return b"".join(iter(lambda: control.recv(200), b"")).decode()
            except TimeoutError:
                raise UserError(f"the local cluster in {self.directory} does not answer", f"see {self.logs}") from None
            except OSError:
                return None

    def _daemons(self, spec: ClusterSpec, programs: Programs) -> dict[str, Sequence[str]]:
        munged = (
            programs.munged,
            "--foreground",
            "--force",  # otherwise it refuses a socket in a private directory
            f"--socket={self.path}/munge.socket",
            f"--key-file={self.path}/munge.key",
            f"--pid-file={self.path}/munged.pid",
            f"--seed-file={self.path}/munged.seed",
        )
        nodes = {name: (programs.slurmd, "-D", "-N", name) for name in spec.node_names}
        return {"munged": munged, "slurmctld": (programs.slurmctld, "-D"), **nodes}


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
