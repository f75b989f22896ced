"""Faults that hit a run while it works, and how each ends."""

import errno
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from benchmarks.soaking.shim import NODES, OPERATIONS
from benchmarks.soaking.site import Process, Site

CONTROLLER_KILLED = "kill -9: slurmctld"
_JUMPS_S = (1, 30, 600, 7200, 3 * 86400)


@dataclass(frozen=True)
class Fault:
    """A fault that was injected: its row and column in the table, and what it did."""

    kind: str
    stage: str
    detail: str = ""


@dataclass
class _Ending:
    """What ends a fault, and when."""

    at: float
    end: Callable[[], None]


@dataclass
class Faults:
    """The faults of one site. `draw` injects a random one; `tick` ends those whose time is over."""

    site: Site
    rng: random.Random
    log: Callable[[Fault], None]
    _endings: dict[str, _Ending] = field(default_factory=dict)

    def draw(self) -> None:
        """Inject a fault of a random kind that most often ends what works now."""
        self._choose((self._kill_process, 9), (self._lose_node, 1), (self._signal_job, 1), (self._fail_operations, 3))

    def draw_mild(self) -> None:
        """Inject a fault of a random kind that a run most often survives without starting again."""
        self._choose(
            (self._jump, 4),
            (self._restart_slurmd, 2),
            (self._kill_controller, 2),
            (self._freeze_process, 3),
            (self._fail_few_operations, 3),
            (self._fill_volume, 1),
        )

    def _choose(self, *weighted: tuple[Callable[[str], None], int]) -> None:
        (inject,) = self.rng.choices([inject for inject, _ in weighted], [weight for _, weight in weighted])
        inject(self.stage())

    def tick(self) -> None:
        """End the faults whose time is over."""
        for name, ending in list(self._endings.items()):
            if time.monotonic() >= ending.at:
                del self._endings[name]
                ending.end()

    @property
    def node_is_lost(self) -> bool:
        return "node" in self._endings

    def end_all(self) -> None:
        """End every fault now. Clocks too: they are right when the next run starts."""
        for ending in self._endings.values():
            ending.at = 0
        self.tick()
        for node in NODES:
            self.site.shim.set_clock(node, 0)

    def stage(self) -> str:
        """The stage of the first running job; `waiting` between jobs, `no job` without any."""
        jobs = self.site.jobs() or []
        running = [job.stage for job in jobs if job.state in ("RUNNING", "COMPLETING")]
        return running[0] if running else "waiting" if jobs else "no job"

    def _later(self, name: str, seconds: float, end: Callable[[], None]) -> None:
        self._endings[name] = _Ending(time.monotonic() + seconds, end)

    def _victim(self) -> Process | None:
        """A process of a job: every role is as likely, however many processes it has."""
        processes = self.site.processes()
        if not processes:
            return None
        role = self.rng.choice(sorted({process.role for process in processes}))
        return self.rng.choice([process for process in processes if process.role == role])

    def _kill_process(self, stage: str) -> None:
        if victim := self._victim():
            with suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGKILL)
                self.log(Fault(f"kill -9: {victim.role}", victim.stage or stage, victim.command))

    def _freeze_process(self, stage: str) -> None:
        if "frozen" in self._endings or not (victim := self._victim()):
            return

        def thaw() -> None:
            with suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGCONT)

        with suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGSTOP)
            seconds = self.rng.uniform(0.5, 15)
            self.log(Fault("process frozen", victim.stage or stage, f"{victim.role}, for {seconds:.1f} s"))
            self._later("frozen", seconds, thaw)

    def _kill_controller(self, stage: str) -> None:
        if {"controller", "node"} & set(self._endings):
            return
        self.site.cluster.kill_controller()
        seconds = self.rng.uniform(0, 36)  # now and then longer than Slurm's programs wait: MessageTimeout
        self.log(Fault(CONTROLLER_KILLED, stage, f"back after {seconds:.1f} s"))
        self._later("controller", seconds, self.site.cluster.start_controller)

    def _restart_slurmd(self, stage: str) -> None:
        if "node" in self._endings:
            return
        node = self.rng.choice(NODES[1:3])
        self.site.cluster.restart_slurmd(node)
        self.log(Fault("kill -9: slurmd", stage, node))

    def _lose_node(self, stage: str) -> None:
        if {"controller", "node"} & set(self._endings):
            return
        node = self.rng.choice(NODES[1:3])
        self.site.cluster.kill_node(node)
        seconds = self.rng.uniform(0, 8)
        self.log(Fault("node lost", stage, f"{node}, back after {seconds:.1f} s"))
        self._later("node", seconds, lambda: self.site.cluster.start_node(node))

    def _fill_volume(self, stage: str) -> None:
        if "volume" in self._endings:
            return
        filler = self.site.volume / "filler"
        left = self.rng.choice((0, 0, 4096, 65536, 1 << 20))
        free = os.statvfs(self.site.volume)
        size = free.f_bavail * free.f_frsize - left
        if size <= 0:
            return
        # ext4 says that it is full once it has allocated what it can
        with filler.open("wb") as file, suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, size)
        seconds = self.rng.uniform(1, 10)
        self.log(Fault("volume full", stage, f"{left} bytes left, for {seconds:.1f} s"))
        self._later("volume", seconds, lambda: filler.unlink(missing_ok=True))

    def _fail_operations(self, stage: str) -> None:
        self._fail(stage, round(10 ** self.rng.uniform(4, 6)))

    def _fail_few_operations(self, stage: str) -> None:
        self._fail(stage, round(10 ** self.rng.uniform(2, 4)))

    def _fail(self, stage: str, per_million: int) -> None:
        """Counted when it ends, if an operation has failed."""
        if "EIO" in self._endings:
            return
        operations = self.rng.sample(OPERATIONS, self.rng.randint(1, len(OPERATIONS)))
        before = sum(self.site.shim.failed().values())
        self.site.shim.fail(errno.EIO, per_million, operations)

        def end() -> None:
            self.site.shim.fail(0, 0, ())
            if failed := sum(self.site.shim.failed().values()) - before:
                self.log(Fault("EIO", stage, f"{failed} of {'+'.join(operations)}, {per_million} of a million"))

        self._later("EIO", self.rng.uniform(1, 8), end)

    def _jump(self, stage: str) -> None:
        node = self.rng.choice(NODES[:3])
        seconds = self.rng.choice(_JUMPS_S) * self.rng.choice((1, -1))
        self.site.shim.set_clock(node, seconds)
        self.log(Fault("clock jump", stage, f"{node} {seconds:+d} s"))

    def _signal_job(self, stage: str) -> None:
        """What an administrator or Slurm does to a running job."""
        running = [job for job in self.site.jobs() or [] if job.state == "RUNNING"]
        if not running:
            return
        job = self.rng.choice(running)
        if job.stage == "train" and self.rng.random() < 0.7:
            if self.rng.random() < 0.5:
                self.site.scancel("--batch", "--signal=USR1", job.job_id)
                self.log(Fault("notice of the time limit", stage))
            else:
                self.site.scontrol("requeue", job.job_id)
                self.log(Fault("scontrol requeue", stage))
        else:
            self.site.scancel(job.job_id)
            self.log(Fault("scancel of one job", stage))
