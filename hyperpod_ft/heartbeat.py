"""How far a rank is, in memory that the watch of its node reads (job/watch.py), and what a rank says of itself.

The watch makes a file in memory for each rank of its node. At its beginning is the rank's `Beat`: to renew it costs a
rank no system call. Then comes how long it worked in its last steps, if it counts that, which costs two in each step.
From `_TEXT` on are the rank's answers: on `ASK`, faulthandler writes the stacks of all threads, even while Python waits
in C. A thread then writes the collectives that torch's flight recorder has, `Collectives`, from `_COLLECTIVES` on, and
last how long they are.
"""

import contextlib
import faulthandler
import json
import mmap
import os
import signal
import statistics
import struct
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from hyperpod_ft.processes import ProcessIdentity

# Set in ranks by the watch: its process, a colon, and the descriptors of the files, by local rank.
FILES = "HYPERPOD_FT_HEARTBEATS"
ASK = signal.SIGUSR2
_ANSWER_SECONDS = 0.25
_COLLECTIVES, _TEXT = 4096, 1 << 24  # what is not written takes no memory
_BEAT, _ASKED = struct.Struct("=qqqdd"), 64
_LENGTH, _LENGTH_AT = struct.Struct("=q"), 72
_SAVES = 8  # that `Spent` tells of
STEPS = 50  # whose work is kept
_WORK, _OF_STEP, _WORK_AT = struct.Struct(f"={STEPS}d"), struct.Struct("=d"), 128

Phase = Literal["start", "step", "validation", "save", "end", "waiting"]
"""What a rank does. `start`: all before its first step; `end`: all after the last; `waiting`: for another job, which
may take any time."""
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class Beat:
    """A sign of progress. `pid` 0: the rank has not begun."""

    pid: int = 0
    phase: Phase = "start"
    step: int = 0  # the last one that is done
    time: float = 0.0  # CLOCK_MONOTONIC, seconds
    last: float = 0.0  # seconds that the last step took; 0: none is known


class Waiting(NamedTuple):
    """A collective that a rank has begun, and that has not ended."""

    name: str  # like `gloo:all_reduce`
    group: str
    begun_at: int  # Unix time, nanoseconds


class Spent(NamedTuple):
    """How long this process was in each phase until `since`, when it entered `phase`. Seconds."""

    phase: Phase
    since: float
    seconds: dict[Phase, float]
    # steps that were done when the first one began and at the newest saves, each with the seconds of phase `step`
    reached: tuple[tuple[int, float], ...] = ()

    def until(self, now: float) -> dict[Phase, float]:
        return self.seconds | {self.phase: self.seconds.get(self.phase, 0.0) + now - self.since}

    def then(self, phase: Phase, step: int, now: float) -> "Spent":
        """The same once it enters the phase, with so many steps done."""
        seconds, reached = self.until(now), self.reached
        if (phase == "save" or (phase == "step" and not reached)) and step not in dict(reached):
            reached = (*reached[:1], *reached[1:][1 - _SAVES :], (step, seconds.get("step", 0.0)))
        return Spent(phase, now, seconds, reached)


@dataclass(frozen=True)
class Collectives:
    """The collectives of a rank."""

    begun: dict[str, int] = field(default_factory=dict)  # how many, by process group
    waiting: list[Waiting] = field(default_factory=list)


class _Own:
    """Of this process."""

    def __init__(self) -> None:
        self.beat = Beat()
        self.since = 0.0  # when the step or phase began
        self.spent = Spent("start", 0.0, {})
        self.worked = 0.0  # seconds until then
        self.schedstat: int | None = None  # a descriptor, see `_worked`; None if this rank does not count its work
        self.memory: mmap.mmap | None = None  # None if this rank is not watched


_own = _Own()


def begin() -> None:
    """Begin to beat, if this rank is watched."""
    if not (files := os.environ.get(FILES)):
        return
    watch, _, descriptors = files.partition(":")
    descriptor = os.open(f"/proc/{watch}/fd/{descriptors.split(',')[int(os.environ['LOCAL_RANK'])]}", os.O_RDWR)
    memory = _own.memory = mmap.mmap(descriptor, _COLLECTIVES)
    os.lseek(descriptor, _TEXT, os.SEEK_SET)
    faulthandler.register(ASK, descriptor)
    threading.Thread(target=_answer, args=(memory, descriptor), daemon=True).start()
    _own.beat = Beat(os.getpid())
    beat()


def count_work() -> None:
    """From now on, say how long the calling thread, which beats, works in each step, where Linux knows it.

    All ranks wait for the slowest one, so a step takes each of them equally long. A rank that waits for others sleeps.
    What tells ranks apart is the time on a CPU, and in the queue for one, where another process may keep a rank.
    """
    if _own.memory is not None:
        with contextlib.suppress(OSError):
            _own.schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)


def _worked(schedstat: int) -> float:
    """Seconds that this thread has been on a CPU or in the queue for one: the second number there, in nanoseconds.

    The first one is the time on a CPU, but up to a tick of the scheduler old, which may be as long as a step.
    """
    return (time.thread_time_ns() + int(os.pread(schedstat, 64, 0).split()[1])) * 1e-9


def beat(phase: Phase | None = None, step: int | None = None) -> None:
    """Show progress, in the present phase and step unless others are given."""
    before, now = _own.beat, time.monotonic()
    ends_step = step is not None and before.phase == "step"
    last = now - _own.since if ends_step else before.last
    if phase or step is not None:
        _own.since = now
        _own.spent = _own.spent.then(phase or before.phase, before.step if step is None else step, now)
        if _own.memory is not None and _own.schedstat is not None:
            worked = _worked(_own.schedstat)
            if step is not None and ends_step:
                _OF_STEP.pack_into(_own.memory, _WORK_AT + step % STEPS * _OF_STEP.size, worked - _own.worked)
            _own.worked = worked
    beat = _own.beat = Beat(before.pid, phase or before.phase, before.step if step is None else step, now, last)
    if _own.memory is not None:
        _BEAT.pack_into(_own.memory, 0, beat.pid, PHASES.index(beat.phase), beat.step, beat.time, beat.last)


def count() -> None:
    """Count anew what `spent` returns."""
    _own.spent = Spent(_own.beat.phase, time.monotonic(), {})


def spent() -> Spent:
    """How long this process was in each phase since `count`. Another thread than that which beats may ask."""
    return _own.spent


@contextlib.contextmanager
def during(phase: Phase) -> Iterator[None]:
    """The phase of a block; then the one before again."""
    before = _own.beat.phase
    beat(phase)
    yield
    beat(before)


def _answer(memory: mmap.mmap, descriptor: int) -> None:
    while not memory[_ASKED]:
        time.sleep(_ANSWER_SECONDS)
    time.sleep(_ANSWER_SECONDS)  # for the stacks
    said = json.dumps(asdict(_collectives())).encode()
    os.pwrite(descriptor, said, _COLLECTIVES)
    _LENGTH.pack_into(memory, _LENGTH_AT, len(said))


def _collectives() -> Collectives:
    """As torch's flight recorder has them, of gloo and of NCCL."""
    found = Collectives()
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        with contextlib.suppress(Exception):  # private, and may be another in the next torch
            for entry in json.loads(getattr(c10d, name)()).get("entries", ()):
                group = entry["process_group"][0]
                found.begun[group] = max(found.begun.get(group, 0), entry["collective_seq_id"])
                if not entry["retired"]:
                    found.waiting.append(Waiting(entry["profiling_name"], group, entry["time_created_ns"]))
    return found


class WatchedRank:
    """The file of one rank, seen from the watch."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("heartbeat")
        os.ftruncate(self.descriptor, _TEXT)
        self._memory = mmap.mmap(self.descriptor, _COLLECTIVES)
        self._process: ProcessIdentity | None = None

    def beat(self) -> Beat:
        pid, phase, *others = _BEAT.unpack_from(self._memory)
        return Beat(pid, PHASES[phase], *others)

    def work(self) -> float:
        """The median seconds that it worked in a step, of the last `STEPS`, see `count_work`; 0: not known."""
        steps = _WORK.unpack_from(self._memory, _WORK_AT)
        return statistics.median(steps) if all(steps) else 0.0

    def running(self) -> int:
        """The rank's pid; 0: it has not begun, or has ended. Its pid may then be another process's."""
        if self._process is None and (pid := self.beat().pid):
            self._process = ProcessIdentity.of(pid) or ProcessIdentity(pid, 0)  # no process started at 0
        return self._process.pid if self._process and self._process.is_alive() else 0

    def ask(self) -> None:
        """Ask for stacks and collectives; a rank that is stopped, or does not run, does not answer."""
        if pid := self.running():
            self._memory[_ASKED] = 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, ASK)

    def answer(self) -> tuple[str, Collectives | None]:
        """The stacks so far, and the collectives; None: not yet."""
        written = os.fstat(self.descriptor).st_size - _TEXT
        stacks = os.pread(self.descriptor, written, _TEXT).decode(errors="replace")
        (length,) = _LENGTH.unpack_from(self._memory, _LENGTH_AT)
        if not length:
            return stacks, None
        said = json.loads(os.pread(self.descriptor, length, _COLLECTIVES))
        return stacks, Collectives(said["begun"], [Waiting(*each) for each in said["waiting"]])

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)


def let_beat(ranks: list[WatchedRank]) -> None:
    """Have the ranks that this process starts beat; `ranks`: by local rank."""
    os.environ[FILES] = f"{os.getpid()}:{','.join(str(rank.descriptor) for rank in ranks)}"
