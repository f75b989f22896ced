"""Processes of this machine: find those below a process, die with a parent, leave no descendant behind.

Slurm daemonises its step daemons and jobs may daemonise too, so killing by pid or process group misses some. A child
subreaper (prctl(2)) stays the ancestor of all of them: a process that loses its parent becomes the subreaper's child.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROC = Path("/proc/self")
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_ZOMBIE = ("Z", "X")
_KILL_SECONDS = 10.0
_POLL_SECONDS = 0.1
_READ_AHEAD = 1 << 17  # bytes, Linux's default
_TRANSFERRED = ("rchar", "wchar", "read_bytes")  # the last: from a disk, so that of a mapped file too


@dataclass(frozen=True)
class ProcessIdentity:
    """A process by number and start time (ticks since boot), so that a reused pid is not mistaken for it."""

    pid: int
    started: int

    @staticmethod
    def of(pid: int) -> "ProcessIdentity | None":
        """The running process `pid`; None if there is none."""
        stat = _stat(pid)
        return ProcessIdentity(pid, stat.started) if stat and stat.state not in _ZOMBIE else None

    def is_alive(self) -> bool:
        """Whether this process is still running; a zombie is not."""
        return ProcessIdentity.of(self.pid) == self


def become_subreaper(name: str) -> None:
    """Adopt every orphaned descendant. `name`: for ps and pkill, so that `pkill python` does not match."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    name_process(name)


def name_process(name: str) -> None:
    """Give this process a name for ps, top and pkill, of at most 15 characters."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def die_with_parent(parent: int, with_signal: signal.Signals) -> None:
    """Get `with_signal` when `parent` dies; exit at once if it already has."""
    _prctl(_PR_SET_PDEATHSIG, with_signal)
    if os.getppid() != parent:
        os._exit(1)


def spawn(argv: Sequence[str], log: Path) -> int:
    """Start a program in its own session, killed when this process dies. Returns its pid.

    Output is appended to `log`. Only for a process with one thread: it forks.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent(parent, signal.SIGKILL)
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.execv(argv[0], list(argv))  # noqa: S606
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(127)


def reap() -> list[int]:
    """Collect every dead child of this process; returns their pids."""
    dead: list[int] = []
    with suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) > 0:
            dead.append(pid)
    return dead


def state(pid: int) -> str:
    """What a process does, as the kernel says it: R runs, S sleeps, D waits for a device or volume, T is stopped.

    Empty if there is none (Linux).
    """
    stat = _stat(pid)
    return stat.state if stat else ""


@dataclass(frozen=True)
class Consumption:
    """What processes have used so far: CPU time in seconds, and bytes that they read and wrote, at least.

    Of a mapped file, they are known from the faults alone if it is on a network volume.
    """

    cpu: float
    transferred: int

    def __add__(self, other: "Consumption") -> "Consumption":
        return Consumption(self.cpu + other.cpu, self.transferred + other.transferred)

    def __sub__(self, other: "Consumption") -> "Consumption":
        return Consumption(self.cpu - other.cpu, self.transferred - other.transferred)

    @staticmethod
    def of(pids: Iterable[int]) -> "Consumption":
        """Of those that still exist (Linux)."""
        cpu, transferred = 0.0, 0
        for pid in pids:
            if stat := _stat(pid):
                cpu += stat.ticks / os.sysconf("SC_CLK_TCK")
                transferred += stat.major_faults * _READ_AHEAD
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
                transferred += sum(int(line.split()[1]) for line in lines if line.startswith(_TRANSFERRED))
        return Consumption(cpu, transferred)


def usable_cpus() -> int:
    """CPUs this process may use: its share of the node where the system reports one, all CPUs elsewhere."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    if _PROC.is_dir():
        return ProcessIdentity.of(pid) is not None
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return done.stdout.strip()[:1] not in ("", "Z")


def descendants(root: int, spare: Collection[int] = ()) -> list[int]:
    """Processes below `root`, children first, zombies too, except those in or below `spare`."""
    children = _children()
    found: list[int] = []
    queue = [root]
    while queue:
        below = [pid for pid in children.get(queue.pop(), []) if pid not in spare]
        queue.extend(below)
        found.extend(below)
    return found


def tree(root: int) -> list[int]:
    """A process and its descendants."""
    return [root, *descendants(root)]


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to those of the processes that still exist."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def end(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    """End a child by SIGTERM, or by SIGKILL if it still runs after `seconds`."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class JsonProcess:
    """A program that answers each line of JSON on its standard input with one on its standard output.

    It has a session of its own: what signals the group of its parent does not end it.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], **options: Any) -> None:
        """`options`: others of Popen. Raises OSError."""
        pipe = subprocess.PIPE
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            argv, env=environment, stdin=pipe, stdout=pipe, start_new_session=True, **options
        )
        assert self.process.stdin and self.process.stdout
        self.stdin, self._stdout = self.process.stdin, self.process.stdout
        os.set_blocking(self.stdin.fileno(), False)

    def ask(self, value: Mapping[str, Any], waiting: Callable[[], None]) -> dict[str, Any]:
        """The answer to a line. Raises EOFError when the program has ended, ValueError when the answer is no JSON.

        `waiting` is called while the program does not read or answer, every 0.1 s; what it raises ends the wait.
        """
        line, answer = json.dumps(value, default=str).encode() + b"\n", b""
        with suppress(BrokenPipeError):  # reading says that it has ended
            while line:
                while not select.select([], [self.stdin], [], _POLL_SECONDS)[1]:
                    waiting()
                line = line[os.write(self.stdin.fileno(), line) :]
        while not answer.endswith(b"\n"):
            while not select.select([self._stdout], [], [], _POLL_SECONDS)[0]:
                if self.process.poll() is not None and not select.select([self._stdout], [], [], 0)[0]:
                    raise EOFError  # even if a child of it still holds its output open
                waiting()
            if not (received := os.read(self._stdout.fileno(), 1 << 16)):
                raise EOFError
            answer += received
        found: dict[str, Any] = json.loads(answer)
        return found

    def kill(self) -> int:
        """End it and its process group at once; returns its exit status."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.stdin.close()
        self._stdout.close()  # not read to its end: what left the process group may hold it
        return self.process.wait()


def kill_descendants(spare: Collection[int] = ()) -> list[int]:
    """SIGKILL everything below this process, a subreaper, until nothing is left but `spare` and what is below it.

    Returns the pids still there after 10 s (uninterruptible in the kernel): normally none. Zombies count: one may have
    running threads, and once its parent is dead this process must reap it.
    """
    deadline = time.monotonic() + _KILL_SECONDS
    while True:
        left = descendants(os.getpid(), spare)
        if not left or time.monotonic() > deadline:
            return left
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            with suppress(OSError):  # not (yet) a child of this process
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


@dataclass(frozen=True)
class _Stat:
    state: str
    parent: int
    started: int
    major_faults: int  # that had to read a page
    ticks: int  # of CPU time


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may contain spaces and brackets
    ticks = int(fields[11]) + int(fields[12])
    return _Stat(fields[0], int(fields[1]), int(fields[19]), int(fields[9]), ticks)


def _children() -> dict[int, list[int]]:
    """The children of every process; from `ps` on systems without /proc."""
    if _PROC.is_dir():
        stats = ((pid, _stat(pid)) for pid in all_pids())
        parents = [(pid, stat.parent) for pid, stat in stats if stat]
    else:
        listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        parents = [(int(pid), int(parent)) for pid, parent in map(str.split, listing.splitlines())]
    children: dict[int, list[int]] = {}
    for pid, parent in parents:
        children.setdefault(parent, []).append(pid)
    return children


def children(parent: int) -> list[int]:
    """The child processes of `parent`."""
    return _children().get(parent, [])


def all_pids() -> list[int]:
    """The ids of all processes (Linux)."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]  # noqa: PTH208 - half the time


def ancestors(pid: int) -> set[int]:
    """The process and everything above it."""
    found = {pid}
    while (stat := _stat(pid)) and stat.parent > 0:
        pid = stat.parent
        found.add(pid)
    return found


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")
