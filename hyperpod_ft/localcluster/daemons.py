"""The watch over a local cluster's daemons: `python -m hyperpod_ft.localcluster RUNTIME`.

    watch ── guard ── munged
          ├─ guard ── slurmctld
          ├─ guard ── slurmd of node1 ── step daemons ── tasks
          └─ guard ── slurmd of node2 ── ...

Watch and guards are child subreapers, so no job process escapes them. A guard kills its descendants when its daemon
ends, on SIGTERM, and when the watch dies (parent-death signal); the watch kills those of a dead guard. So any one of
them may get SIGKILL, and no process stays behind. On SIGUSR1 a guard kills its daemon alone, and starts it again.
"""

import fcntl
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hyperpod_ft.localcluster.ports import is_listening
from hyperpod_ft.processes import (
    ProcessIdentity,
    become_subreaper,
    die_with_parent,
    kill_descendants,
    reap,
    spawn,
)

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_RESTART = signal.SIGUSR1  # has a guard kill its daemon alone, and start it again
_TICK_SECONDS = 0.2
_CORE = ("munged", "slurmctld")


@dataclass(frozen=True)
class WatchSpec:
    """What the watching process needs to run a cluster.

    Until the starter sends `keep`, the cluster ends with it; after that, with `owner` if any.

    `daemons`: command lines by name, in starting order. `held_fds`: the locks that show that the cluster exists;
    guards hold them too, so they are released only when every process has ended.
    """

    runtime: str
    control_fd: int
    held_fds: Sequence[int]
    daemons: dict[str, Sequence[str]]
    controller_port: int
    starter: ProcessIdentity
    owner: ProcessIdentity | None

    @staticmethod
    def from_json(text: str) -> "WatchSpec":
        """Read the specification from the JSON of its fields."""
        fields = json.loads(text)
        bound_to = {key: ProcessIdentity(**fields[key]) for key in ("starter", "owner") if fields[key]}
        return WatchSpec(**fields | bound_to)


class _StopError(Exception):
    """The cluster must end; the message says why."""


class DaemonWatch:
    """Starts the daemons of a cluster, answers the control socket, and ends everything."""

    def __init__(self, spec: WatchSpec) -> None:
        self.spec = spec
        self.runtime = Path(spec.runtime)
        self.control = socket.socket(fileno=spec.control_fd)
        self.guards: dict[str, int] = {}
        self.kept = False
        self.stopper: socket.socket | None = None

    def run(self) -> None:
        """Run until asked to stop, or until an essential daemon or the process it is bound to ends."""
        become_subreaper("hyperpod-ft")
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        for fd in (self.spec.control_fd, *self.spec.held_fds):
            os.set_inheritable(fd, False)
        # systemd-tmpfiles deletes old files below /tmp, but not in a locked directory.
        fcntl.flock(os.open(self.runtime, os.O_RDONLY), fcntl.LOCK_SH)
        try:
            self._tick()
            for name in self.spec.daemons:
                self._start(name)
                # A daemon that does not find the previous one retries only after a second.
                while not self._is_ready(name):
                    time.sleep(0.01)
                    self._tick()
            while True:
                self._answer()
                self._tick()
        except _StopError as stop:
            print(f"stop: {stop}", flush=True)
        finally:
            self._end()

    def _start(self, name: str) -> None:
        self.guards[name] = _guard(self.spec.daemons[name], self.runtime / "logs" / f"{name}.out", self.spec.held_fds)

    def _is_ready(self, name: str) -> bool:
        if name == "munged":
            return (self.runtime / "munge.socket").exists()
        return name != "slurmctld" or is_listening(self.spec.controller_port)

    def _tick(self) -> None:
        if caught := signal.sigtimedwait(_STOP_SIGNALS, 0):
            raise _StopError(f"signal {caught.si_signo}")
        bound_to = self.spec.owner if self.kept else self.spec.starter
        if not (self.runtime / "control").exists():
            raise _StopError(f"{self.runtime} was removed")
        if bound_to and not bound_to.is_alive():
            raise _StopError(f"process {bound_to.pid}, to which this cluster is bound, ended")
        dead = reap()
        for name in [name for name, pid in self.guards.items() if pid in dead]:
            del self.guards[name]
            # None are left if the guard did its work; if it was killed, its processes are now below this one.
            kill_descendants(spare=set(self.guards.values()))
            if name in _CORE:
                raise _StopError(f"{name} ended: see {name}.log and {name}.out")

    def _answer(self) -> None:
        if not select.select([self.control], [], [], _TICK_SECONDS)[0]:
            return
        connection, _ = self.control.accept()
        connection.settimeout(10)  # on a busy machine, a client may speak seconds after it has connected
        with suppress(OSError):  # a client that disconnects does not end the watch
            verb, _, name = connection.recv(200).decode().partition(" ")
            if verb == "stop":
                self.stopper = connection
                raise _StopError("requested")
            with connection:
                connection.sendall(self._obey(verb, name).encode())

    def _obey(self, verb: str, name: str) -> str:
        if verb == "keep":
            self.kept = True
        if verb in ("keep", "ping"):
            return f"{'up' if self.kept else 'starting'} {os.getpid()}"
        if verb in ("kill", "start") and name != "munged" and name in self.spec.daemons:
            self._cut(name)
            if verb == "start":
                self._start(name)
            return "done"
        if verb == "restart" and name in self.guards:
            os.kill(self.guards[name], _RESTART)
            return "done"
        return "refused"

    def _cut(self, name: str) -> None:
        """Send SIGKILL to every process of a node, as a power cut would end them; or to slurmctld."""
        pid = self.guards.pop(name, None)
        if pid is not None:
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)

    def _end(self) -> None:
        for pid in self.guards.values():
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 10
        waiting = set(self.guards.values())
        while waiting and time.monotonic() < deadline:
            waiting.difference_update(reap())
            time.sleep(0.01)
        if left := kill_descendants():
            print(f"could not kill: {left}", flush=True)
        shutil.rmtree(self.runtime, ignore_errors=True)
        if self.stopper:
            with suppress(OSError):
                self.stopper.sendall(b"stopped")


def _guard(argv: Sequence[str], log: Path, held_fds: Sequence[int]) -> int:
    """Fork a process that starts one daemon and kills all its descendants when it ends. Returns the pid."""
    watch = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        become_subreaper("hyperpod-ft")
        signals = (signal.SIGTERM, signal.SIGCHLD, _RESTART)
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        die_with_parent(watch, signal.SIGTERM)
        _close_all_but({0, 1, 2, *held_fds})  # the watch's sockets must close when it dies
        daemon = spawn(argv, log)
        while daemon not in reap():
            caught = signal.sigtimedwait(signals, 1)
            if caught and caught.si_signo == signal.SIGTERM:
                break
            if caught and caught.si_signo == _RESTART:
                os.kill(daemon, signal.SIGKILL)
                os.waitpid(daemon, 0)
                daemon = spawn(argv, log)
        kill_descendants()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _close_all_but(kept: set[int]) -> None:
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names only
        if int(entry) not in kept:
            with suppress(OSError):
                os.close(int(entry))


def main() -> NoReturn:
    """Detach from the starter and run the cluster of watch.json in the runtime directory argv[1]."""
    spec = WatchSpec.from_json((Path(sys.argv[1]) / "watch.json").read_text())
    if os.fork():
        os._exit(0)  # so that the starter has no child to reap
    try:
        DaemonWatch(spec).run()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)
