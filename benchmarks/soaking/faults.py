"""Faults that hit a run while it works, and how each ends."""

import errno
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from benchmarks.soaking.shim import NODES, OPERATIONS
from benchmarks.soaking.site import HANG_S, Process, Site

CONTROLLER_KILLED = "kill -9: slurmctld"
_JUMPS_S = (1, 30, 600, 7200, 3 * 86400)
_FOREVER = float("inf")
_FOUND_S = 240.0  # how long it may take until a hang is reported


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
    """The faults of one site. `draw` injects a random one; `tick` ends those whose time is over.

    `nodes`: those that the run works on; `with_fewer`: whether it continues when one of them is lost.
    """

    site: Site
    rng: random.Random
    log: Callable[[Fault], None]
    nodes: Sequence[str] = NODES[1:3]
    with_fewer: bool = False
    _endings: dict[str, _Ending] = field(default_factory=dict)
    _stopping: threading.Thread = field(default_factory=threading.Thread)
    _hangs_until: list[float] = field(default_factory=list)
    _hung: list[int] = field(default_factory=list)  # processes

    def draw(self) -> None:
        """Inject a fault of a random kind that most often ends what works now."""
        self._choose(
            (self._kill_process, 9),
            (self._hang_torchrun, 4),
            (self._lose_node, 6 if self.with_fewer else 1),
            (self._signal_job, 1),
            (self._fail_operations, 3),
        )

    def draw_mild(self) -> None:
        """Inject a fault of a random kind that a run most often survives without starting again."""
        self._choose(
            (self._jump, 4),
            (self._restart_slurmd, 2),
            (self._kill_controller, 2),
            (self._freeze_process, 3),
            (self._slow_rank, 9),
            (self._hang_rank, 4),
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
        """End every fault now. Clocks too: they are right when the next run starts.

        What hangs is left to Slurm, unless its step daemon was killed too: nothing else would end it.
        """
        for pid in self._hung:
            if self.site.is_orphan(pid):
                os.kill(pid, signal.SIGKILL)
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

    def explain_hang(self) -> bool:
        """Whether a hang that was just reported can be of a process that was stopped. Each explains one."""
        self._hangs_until = [until for until in self._hangs_until if time.monotonic() < until]
        return bool(self._hangs_until and self._hangs_until.pop(0))

    def _victim(self, role: str = "") -> Process | None:
        """A process of a job, of this role if any: every role is as likely, however many processes it has."""
        processes = [process for process in self.site.processes() if role in ("", process.role)]
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
        self._stop("process frozen", stage, [(self.rng.uniform(0.5, 15), 0)], self._victim())

    def _hang_torchrun(self, stage: str) -> None:
        self._stop("hung: torchrun", stage, [(_FOREVER, 0)], self._victim("torchrun"))

    def _hang_rank(self, stage: str) -> None:
        self._stop("hung: rank", stage, [(_FOREVER, 0)], self._victim("rank"))

    def _slow_rank(self, stage: str) -> None:
        """Each stop is too short for a hang."""
        turns = [(self.rng.uniform(0.1, HANG_S / 5), self.rng.uniform(0.1, 0.5)) for _ in range(self.rng.randint(3, 9))]
        self._stop("slow rank", stage, turns, self._victim("rank"))

    def _stop(self, kind: str, stage: str, turns: Sequence[tuple[float, float]], victim: Process | None) -> None:
        """Stop a process for so many seconds, and have it go on for so many, in turns. One process at a time.

        A thread of its own keeps the time: what this one does may take longer than a hang.
        """
        if victim is None or self._stopping.is_alive():
            return
        try:
            process = os.pidfd_open(victim.pid)
            signal.pidfd_send_signal(process, signal.SIGSTOP)
        except ProcessLookupError:
            return

        def take_turns() -> None:
            with suppress(ProcessLookupError):
                for stopped, goes_on in turns:
                    signal.pidfd_send_signal(process, signal.SIGSTOP)
                    if stopped == _FOREVER:
                        self._hung.append(victim.pid)
                        break
                    time.sleep(stopped)
                    signal.pidfd_send_signal(process, signal.SIGCONT)
                    time.sleep(goes_on)
            os.close(process)

        self._stopping = threading.Thread(target=take_turns)
        self._stopping.start()
        longest = max(stopped for stopped, _ in turns)
        if longest > HANG_S / 2:
            self._hangs_until.append(time.monotonic() + _FOUND_S)
        self.log(Fault(kind, victim.stage or stage, f"{victim.role} {victim.pid}, {len(turns)} x {longest:.1f} s"))

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
        node = self.rng.choice(self.nodes)
        self.site.cluster.restart_slurmd(node)
        self.log(Fault("kill -9: slurmd", stage, node))

    def _lose_node(self, stage: str) -> None:
        if {"controller", "node"} & set(self._endings):
            return
        node = self.rng.choice(self.nodes)
        self.site.cluster.kill_node(node)
        seconds = self.rng.uniform(0, 40 if self.with_fewer else 8)
        kind = "node lost, with min_nodes" if self.with_fewer else "node lost"
        self.log(Fault(kind, stage, f"{node}, back after {seconds:.1f} s"))
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
        node = self.rng.choice((NODES[0], *self.nodes))
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
