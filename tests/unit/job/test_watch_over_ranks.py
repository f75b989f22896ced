"""The watch over the ranks of a job, with small programs in place of ranks, and nodes that are threads."""

import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from hyperpod_ft import heartbeat, publish
from hyperpod_ft.engines.ranks import COLLECTIVE_TIMEOUT
from hyperpod_ft.heartbeat import PHASES, Beat, Collectives, Waiting, WatchedRank
from hyperpod_ft.job import recovery, watch
from hyperpod_ft.job.hang import RankState, suspect
from hyperpod_ft.job.watch import NodePlace, RankProgress, Watch
from hyperpod_ft.processes import Consumption, ProcessIdentity
from hyperpod_ft.runs.attempts import NodeFailure
from hyperpod_ft.runs.job_files import ATTEMPT_DIRECTORY, hangs, slowest_ranks
from hyperpod_ft.runs.results import slowest_rank
from tests.waiting import wait_for

REPOSITORY = Path(__file__).resolve().parents[3]
# A rank that makes five steps, and then does what it is told, once all have: a busy machine starts some of them late.
RANK = """
import os, signal, sys, time
from pathlib import Path
from hyperpod_ft import heartbeat
heartbeat.begin()
for step in range(1, 6):
    heartbeat.beat("step", step)
does, rank, ranks, directory = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
with heartbeat.during("waiting"):
    (directory / f"begun-{rank}").touch()
    while len(list(directory.glob("begun-*"))) < ranks:
        time.sleep(0.01)
def stop():
    os.kill(os.getpid(), signal.SIGSTOP)
def read():
    os.mkfifo(directory / "fifo")
    open(directory / "fifo")
def gather():
    time.sleep(300)
def work(seconds=0.001):
    heartbeat.count_work()
    for step in range(6, 1 << 30):
        heartbeat.beat("step", step)
        begun = time.thread_time()
        while time.thread_time() < begun + seconds:
            pass
        time.sleep(0.015 - seconds)
def toil():
    work(0.014)
def go_on():
    while True:
        heartbeat.beat("step", 6)
        (directory / "went-on").touch()
        time.sleep(0.01)
globals()[does]()
"""
COST = """
import time
from hyperpod_ft import heartbeat
heartbeat.begin()
heartbeat.count_work()
heartbeat.beat("step", 0)
costs = []
for step in range(0, 2000, 100):
    begun = time.thread_time()
    for each in range(step, step + 100):
        heartbeat.beat("step", each)
    costs.append((time.thread_time() - begun) / 100)
print(min(costs))
"""


class MemoryStore:
    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


class Nodes:
    """Nodes of two ranks each."""

    def __init__(self, directory: Path, ends: ExitStack) -> None:
        self.directory, self.ends, self.store = directory, ends, MemoryStore()
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.attempt = directory / "attempt"
        self.attempt.mkdir()
        self.program = directory / "ranks.py"
        self.program.write_text(RANK)

    def start(self, nodes: int, *does: str) -> list[Watch]:
        """Each watched node, its ranks doing what `does` says, in order; `nodes`: how many there are."""
        watches = []
        for number, first in enumerate(range(0, len(does), 2)):
            place = NodePlace(f"node{number + 1}", number, nodes, first)
            watches.append(Watch(lambda: self.store, place, 2, self.directory))
            self.ends.enter_context(watches[-1])
            environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
            for rank in (first, first + 1):
                arguments = [sys.executable, self.program, does[rank], str(rank), str(len(does)), self.directory]
                self.ranks.append(subprocess.Popen(arguments, env=environment | {"LOCAL_RANK": str(rank - first)}))
        return watches

    def failures(self) -> tuple[NodeFailure, ...]:
        wait_for(lambda: "reported" in self.store.values)
        return recovery.failures(self.attempt)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setenv(watch.LIMIT, "1.5")
    monkeypatch.setattr(watch, "_GENEROUS", 200)  # before its steps, a rank may be as late as a busy machine makes it
    monkeypatch.setattr(watch, "_ANSWER_SECONDS", 60.0)
    monkeypatch.setenv(ATTEMPT_DIRECTORY, str(tmp_path / "attempt"))
    with ExitStack() as ends:
        nodes = Nodes(tmp_path, ends)
        yield nodes
        for rank in nodes.ranks:
            rank.kill()
            rank.wait()


def test_a_stopped_rank_of_another_node(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = threading.Event()
    slow = SimpleNamespace(write_text=lambda *file: may_write.wait(300) and publish.write_text(*file))
    monkeypatch.setattr(watch, "publish", slow)
    monkeypatch.setattr(watch, "_STACKS_SECONDS", 300.0)
    watches = nodes.start(2, "gather", "gather", "gather", "stop")
    (failure,) = nodes.failures()
    assert (failure.rank, failure.node, failure.status) == (3, "node2", 137)
    assert failure.hang == "in step 6: its process is stopped"
    assert [rank.wait(300) for rank in nodes.ranks] == [-signal.SIGKILL] * 4
    assert [each.found_hang for each in watches] == [True, False]
    assert not hangs(nodes.directory).exists(), "the volume is slow"
    may_write.set()
    nodes.ends.close()  # waits for the files
    (directory,) = hangs(nodes.directory).iterdir()
    first, *_, last = sorted(directory.iterdir())
    assert first.read_text().startswith("rank 0 on node1, in step 6; its process: S\n")
    assert "in gather\n" in first.read_text()
    assert last.read_text().startswith("rank 3 on node2, in step 6; its process: T\n")


def test_a_read_that_does_not_end(nodes: Nodes) -> None:
    nodes.start(1, "gather", "read")
    (failure,) = nodes.failures()
    assert failure.rank == 1 and failure.hang.startswith("in step 6: others wait for it, at read (ranks.py:")


def test_a_node_that_does_not_answer(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its torchrun, too, is stopped."""
    monkeypatch.setattr(watch, "_ANSWER_SECONDS", 1.0)
    nodes.start(2, "gather", "gather")
    (failure,) = nodes.failures()
    assert (failure.rank, failure.node, failure.hang) == (2, "node 2 of 2", "in step 6: its node does not answer")


def test_an_answer_amid_stacks_that_are_still_written(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Collectives({"world": 7}, [Waiting("gloo:all_reduce", "world", 1)])
    monkeypatch.setattr(heartbeat, "_collectives", lambda: said)
    rank, text = WatchedRank(), heartbeat._TEXT
    with closing(rank), mmap.mmap(rank.descriptor, mmap.PAGESIZE) as memory:
        memory[heartbeat._ASKED] = 1
        os.pwrite(rank.descriptor, b"Thread", text)
        os.pwrite(rank.descriptor, b'{"begun": {', heartbeat._COLLECTIVES)
        assert rank.answer() == ("Thread", None)
        heartbeat._answer(memory, rank.descriptor)
        os.pwrite(rank.descriptor, b" 0x7", text + 6)
        assert rank.answer() == ("Thread 0x7", said)


def test_a_pid_that_another_process_has_by_now(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, other = WatchedRank(), subprocess.Popen(["sleep", "300"])
    with closing(rank), mmap.mmap(rank.descriptor, mmap.PAGESIZE) as memory:
        heartbeat._BEAT.pack_into(memory, 0, other.pid, 0, 0, 0.0, 0.0)
        with monkeypatch.context() as earlier:
            earlier.setattr(ProcessIdentity, "of", lambda pid: ProcessIdentity(pid, 1))
            assert rank.running() == other.pid
        assert rank.running() == 0
        rank.ask()  # by a signal that ends who does not expect it
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.2)
    other.kill()
    assert other.wait() == -signal.SIGKILL


def look_after(goes_on: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have watches look only after `goes_on`: a busy machine may keep a process from that for longer than a limit."""
    look = Watch._look

    def look_late(watch: Watch, elapsed: float) -> None:
        goes_on()
        look(watch, elapsed)

    monkeypatch.setattr(Watch, "_look", look_late)


def test_a_job_does_not_hang_while_a_rank_goes_on(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    went_on, enough = nodes.directory / "went-on", threading.Event()

    def goes_on() -> None:
        before = went_on.exists() and went_on.stat().st_mtime_ns
        wait_for(lambda: enough.is_set() or (went_on.exists() and went_on.stat().st_mtime_ns != before))

    look_after(goes_on, monkeypatch)
    watches = nodes.start(2, "gather", "gather", "gather", "go_on")
    wait_for(lambda: all(each._looks > 20 for each in watches), what="twice the limit")
    enough.set()
    assert "hang" not in nodes.store.values


def test_a_rank_of_another_node_that_works_longer(nodes: Nodes) -> None:
    nodes.start(2, "work", "work", "work", "toil")
    path = slowest_ranks(nodes.directory)
    (row,) = wait_for(lambda: slowest_rank.read(path))
    assert (row.rank, row.node, row.several_nodes, row.is_slow) == (3, "node2", True, True)
    assert row.seconds > 0.013 and row.others > 0.001, "what they sleep is no work"
    assert "hang" not in nodes.store.values


def test_a_beat_costs_less_than_a_thousandth_of_a_short_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(heartbeat.FILES, "")
    with closing(WatchedRank()) as rank:
        heartbeat.let_beat([rank])
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "LOCAL_RANK": "0"}
        done = subprocess.run([sys.executable, "-c", COST], env=environment, capture_output=True, text=True, check=True)
        assert rank.work() > 0 and rank.beat().step == 1999
    assert float(done.stdout) < 1e-5, "seconds"


def test_imports_that_take_long_before_there_are_ranks(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process below the watch's, which ranks would be forked from, computes for longer than the limit."""
    monkeypatch.setattr(watch, "_GENEROUS", 1)
    monkeypatch.setattr(watch, "signal_all", lambda *_: None)  # all below this process
    imported = nodes.directory / "imported"
    program = f"import time\nwhile time.process_time() < 2: pass\nopen({str(imported)!r}, 'w')\ntime.sleep(300)"
    nodes.ranks.append(importing := subprocess.Popen([sys.executable, "-c", program]))

    def computes() -> None:
        before = Consumption.of([importing.pid]).cpu
        wait_for(lambda: imported.exists() or Consumption.of([importing.pid]).cpu > before + 0.03)

    look_after(computes, monkeypatch)
    nodes.ends.enter_context(Watch(lambda: nodes.store, NodePlace("node1", 0, 1, 0), 2, nodes.directory))
    (failure,) = nodes.failures()
    assert imported.exists() and failure.hang == "before its first step: its program has not begun"


def test_a_mapped_file_that_is_read_counts(tmp_path: Path) -> None:
    if not os.major(tmp_path.stat().st_dev):
        pytest.skip("in memory")
    path, size = tmp_path / "weights", 1 << 20
    with path.open("wb+") as file:
        file.write(os.urandom(size))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = Consumption.of([os.getpid()])
        with mmap.mmap(file.fileno(), size) as mapped:
            assert sum(mapped[:: mmap.PAGESIZE])
        assert (Consumption.of([os.getpid()]) - before).transferred > size


def test_what_progress_is() -> None:
    none, works = Consumption(0.0, 0), Consumption(0.5, 0)
    reads = Consumption(0.0, 1 << 20)

    def silence(*beats: Beat, moved: Consumption = none, below: Consumption = none, seconds: int = 50) -> RankProgress:
        progress = RankProgress(60.0)
        for beat in beats:
            progress.see(beat, 1.0)
        for _ in range(seconds):
            progress.see(beats[-1], 1.0, moved, below)
        return progress

    start, step, slow = Beat(1, "start", 0, 1.0), Beat(1, "step", 1, 1.0, 2.0), Beat(1, "step", 1, 1.0, 10.0)
    assert silence(start).silent == 50
    assert silence(start, moved=works).silent == silence(start, moved=reads).silent == 0
    # an accelerator that is waited for looks like work
    assert silence(step, moved=works).silent == silence(step, moved=reads).silent == 50
    batches = [Beat(1, "validation", 1, moment, 2.0) for moment in (2.0, 3.0, 4.0)]
    assert [silence(step, *batches[:begun], moved=works).silent for begun in (1, 2, 3)] == [0, 0, 50]
    assert silence(step, moved=works, below=works).silent == 0, "a compiler"
    # how long a step takes is not known before the first one is over
    first = Beat(1, "step", 0, 1.0)
    assert (silence(first, moved=works).silent, silence(first).limit) == (0, 600)
    # computing alone is not enough for ever
    assert silence(start, moved=works, seconds=3400).silent == pytest.approx(100, abs=2)
    assert silence(start, moved=reads, seconds=3400).silent == 0

    assert [silence(step).limit, silence(slow).limit, silence(step, slow).limit] == [60, 100, 60]
    assert silence(Beat(1, "step", 1, 1.0, 1000.0)).limit == watch.LONGEST_SECONDS
    limits = {phase: silence(Beat(1, phase, 0, 1.0)).limit for phase in PHASES}
    assert limits == {"start": 600, "step": 600, "validation": 600, "save": 600, "end": 600, "waiting": float("inf")}
    assert timedelta(seconds=watch.LONGEST_SECONDS) < COLLECTIVE_TIMEOUT, "the watch speaks first"


def stacks(frame: str) -> str:
    function, _, place = frame.partition(" ")
    file, _, line = place.strip("()").partition(":")
    other = 'Thread 0x7 (most recent call first):\n  File "/a/threading.py", line 1 in wait\n\n'
    return f'{other}Thread 0x8 (most recent call first):\n  File "/a/{file}", line {line} in {function}\n'


def rank(number: int, frame: str = "", *, step: int = 5, process: str = "S", **begun: int) -> RankState:
    """`begun`: of groups, the collectives; the frame's group is the one that it waits in."""
    collectives = Collectives(begun, [])
    if frame.startswith("all_reduce"):
        group = list(begun)[-1]
        collectives.waiting.append(Waiting("gloo:all_reduce", group, begun[group]))
    return RankState(number, "node1", "step", step, process, stacks=stacks(frame), collectives=collectives)


WAITS = "all_reduce (distributed_c10d.py:7)"


@pytest.mark.parametrize(
    ("ranks", "found", "why"),
    [
        ([rank(0, WAITS, world=9), rank(1, process="T")], 1, "its process is stopped"),
        ([rank(0, WAITS, world=9), rank(1, process="")], 1, "its program has not begun"),
        ([rank(0, WAITS, world=9), rank(1, "read (rows.py:3)")], 1, "others wait for it, at read (rows.py:3)"),
        ([rank(0, "gather (ranks.py:3)"), rank(1, "f (a.py:1)")], 1, "others wait for it, at f (a.py:1)"),
        ([rank(0, "f (a.py:1)", step=6), rank(1, "g (a.py:2)")], 1, "it does not go on, at g (a.py:2)"),
        ([rank(0, WAITS, world=9), rank(1, process="D")], 1, "it waits for a device or volume"),
        ([rank(0, process="X"), rank(1, "f (a.py:1)")], 1, "it does not go on, at f (a.py:1)"),
        ([rank(0, process="X"), rank(1, WAITS, world=9)], 0, "others wait for it"),
        ([rank(0, "f (a.py:1)")], 0, "it does not go on, at f (a.py:1)"),
        # rank 1 skipped the ninth of the world's collectives, went on, and waits in the next of another group
        (
            [rank(0, WAITS, tp=20, world=9), rank(1, WAITS, step=6, world=8, tp=21)],
            1,
            f"it has not begun a collective, gloo:all_reduce, in which others wait, at {WAITS}",
        ),
        ([rank(0, WAITS, world=9), rank(1, WAITS, world=9)], 0, f"all ranks wait for each other, at {WAITS}"),
    ],
)
def test_whom_the_others_wait_for(ranks: Sequence[RankState], found: int, why: str) -> None:
    which, said = suspect(ranks)
    assert (which.rank, said.removeprefix(f"in step {which.step + 1}: ").removesuffix(", at  (:)")) == (found, why)
