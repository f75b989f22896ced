"""The watch over the ranks of a job: it finds that they hang, and which of them the others wait for, and ends them.

A thread of each node's torchrun looks once a second at how far its ranks are (heartbeat.py), and tells the first node,
through torchrun's store. Ranks wait for each other all the time, so one that waits proves nothing: the job hangs when
no rank makes progress. Then each node asks its ranks for their stacks and collectives, and the first names the rank
that the others wait for, reports it to the supervisor as a failure, and has all nodes kill their ranks. Ranks that are
slow are only named.

What progress is depends on the phase. The first step compiles, and so does the first batch of a validation. After them,
progress is the next one, or a compiler that computes in a process of its own: a wait for an accelerator may look like
work. What the rank itself computes, reads and writes counts only elsewhere.
"""

import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter

from hyperpod_ft import publish
from hyperpod_ft.heartbeat import FILES, STEPS, Beat, Collectives, WatchedRank, let_beat
from hyperpod_ft.job.hang import STOPPED, RankState, suspect
from hyperpod_ft.job.recovery import report_failure
from hyperpod_ft.processes import Consumption, descendants, signal_all, state, tree
from hyperpod_ft.runs.job_files import KILLED_STATUS, hangs, slowest_ranks
from hyperpod_ft.runs.jobs import own_job_id
from hyperpod_ft.runs.results.slowest_rank import RankWork, SlowestRank, add, slowest

# For tests: the seconds without progress that are a hang.
LIMIT = "HYPERPOD_FT_HANG_SECONDS"
_LIMIT_SECONDS = 60.0
_MEDIAN_STEPS = 10  # or as many median steps, if that is longer
# Until the first step is over, since packages come from a shared volume that other nodes read too, and of a save: to
# flush what was written uses no CPU time.
_GENEROUS = 10
# A rank that computes, but neither beats nor reads or writes, is waited for as long: less than COLLECTIVE_TIMEOUT of
# engines/ranks.py, so that the watch finds a hang before a collective gives up.
LONGEST_SECONDS = 55 * 60.0
_NO_LIMIT = float("inf")
_LOOK_SECONDS = 1.0
_REMEMBERED_STEPS = 50
_ANSWER_SECONDS = 3.0  # that ranks have, and as many again that nodes have
_STACKS_SECONDS = 5.0  # that the files of a hang have, once all ranks are dead: the supervisor waits for 10 s
_WORKING = 0.05  # CPU time per second, of processes that do not only wait
_READING = 1 << 16  # bytes a second
_RANKS = TypeAdapter(list[RankState])


@dataclass(frozen=True)
class NodePlace:
    """A node, and its place in the job."""

    node: str
    number: int  # from 0
    nodes: int
    first_rank: int


class Store(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str) -> Any: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


class RankProgress:
    """How long a rank has made no progress, in time that the watch was running: a suspended job does not hang."""

    def __init__(self, limit: float) -> None:
        self._limit, self._beat = limit, Beat()
        self.silent = 0.0  # seconds
        self._only_computing = 0.0  # seconds since it did anything else
        self._steps: list[float] = []  # seconds of each
        self._batches = 0  # that have begun in this validation

    def see(
        self, beat: Beat, elapsed: float, moved: Consumption | None = None, moved_below: Consumption | None = None
    ) -> None:
        """Note what the rank did in the last `elapsed` seconds.

        `moved`: what its processes consumed in them, if known; `moved_below`: the same without the rank itself.
        """
        before, self._beat = self._beat, beat
        self.silent += elapsed
        self._only_computing += elapsed
        if beat.step > before.step and beat.last:
            self._steps = [*self._steps, beat.last][-_REMEMBERED_STEPS:]
        validates = before.phase == beat.phase == "validation"
        self._batches = self._batches + (beat != before) if validates else 0
        compiled = self._batches > 1 if beat.phase == "validation" else beat.phase == "step" and bool(self._steps)
        counted = moved_below if compiled else moved
        computing = counted is not None and counted.cpu > _WORKING * elapsed
        transferring = counted is not None and counted.transferred > _READING * elapsed
        if beat != before or transferring:
            self._only_computing = 0.0
        if beat != before or transferring or (computing and self._only_computing < LONGEST_SECONDS):
            self.silent = 0.0

    @property
    def limit(self) -> float:
        """The seconds of silence that are a hang."""
        match self._beat.phase:
            case "waiting":
                return _NO_LIMIT
            case "step" | "validation" if self._steps:
                return min(max(self._limit, _MEDIAN_STEPS * statistics.median(self._steps)), LONGEST_SECONDS)
        return _GENEROUS * self._limit


class SlowRanks:
    """Which rank of a job works longest: on its first node. Keeps rows, and names each slow place once in the log."""

    def __init__(self, run_directory: Path) -> None:
        self._path, self._step = slowest_ranks(run_directory), 0
        self._adds: threading.Thread | None = None

    def see(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        """See what each node has said last; once in `STEPS` steps, something is made of it."""
        step = min(node["step"] for node in nodes)
        known = all(node["work"] and all(node["work"]) for node in nodes)
        if not known or step < self._step + STEPS or (self._adds and self._adds.is_alive()):
            return
        self._step = step
        of_nodes = [(node["node"], enumerate(node["work"], node["first_rank"])) for node in nodes]
        ranks = [RankWork(rank, node, seconds) for node, works in of_nodes for rank, seconds in works]
        if row := slowest(ranks, own_job_id(), step):
            # the volume may be what hangs
            self._adds = threading.Thread(target=self._add, args=(row,), daemon=True)
            self._adds.start()

    def _add(self, row: SlowestRank) -> None:
        with suppress(OSError):
            if add(self._path, row):
                print(f"watch: {row}", file=sys.stderr, flush=True)


def _said(
    place: NodePlace, look: int, silent: float | None, limit: float, step: int = 0, work: Sequence[float] = ()
) -> str:
    """What a node says, another text at each look: for how long its ranks have been silent; None: none runs.

    `step`: that all its ranks have done; `work`: of each, the seconds in a step.
    """
    said = {"look": look, "silent": silent, "limit": limit, "step": step, "work": work}
    return json.dumps(asdict(place) | said)


def _shortest(limits: Iterable[float]) -> float:
    """Of ranks or nodes: all save together, so one that is in its step keeps the others from it. None if one waits."""
    known = list(limits)
    return _NO_LIMIT if _NO_LIMIT in known else min(known, default=LONGEST_SECONDS)


class Watch:
    """The watch of one node of a job."""

    def __init__(self, connect: Callable[[], Store], place: NodePlace, ranks: int, run_directory: Path) -> None:
        """`connect`: to the store of all nodes; `ranks`: of this node."""
        self._connect, self._place, self._run_directory = connect, place, run_directory
        # elsewhere there is no /proc
        self._ranks = [WatchedRank() for _ in range(ranks if sys.platform == "linux" else 0)]
        limit = float(os.environ.get(LIMIT, _LIMIT_SECONDS))
        self._look_seconds = min(_LOOK_SECONDS, limit / 10)
        self._look_closer = limit / 6  # silence from which on processes are looked at: in most steps, they are not
        self._progress = [RankProgress(limit) for _ in self._ranks]
        # by local rank: at the last look that was closer, of its processes, and of those below it
        self._consumed: dict[int, tuple[Consumption, Consumption]] = {}
        self._said = [""] * place.nodes  # by each node, and for how long it has said nothing else
        self._unchanged = [0.0] * place.nodes
        self._heard = [False] * place.nodes  # whether it has said anything
        self._looks = 0
        self._slow_ranks = SlowRanks(run_directory)
        self.found_hang = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._reports: threading.Thread | None = None

    def __enter__(self) -> None:
        """Before the ranks are started."""
        let_beat(self._ranks)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        """When the ranks have ended."""
        os.environ.pop(FILES, None)  # its files are closed
        self._over.set()
        self._thread.join(_LOOK_SECONDS)  # not longer: it may still wait for the store
        if self._reports:
            self._reports.join(_STACKS_SECONDS)

    def _run(self) -> None:
        # when torchrun has ended on the first node, so has its store
        with ExitStack() as ends, suppress(RuntimeError):
            for rank in self._ranks:
                ends.callback(rank.close)
            self._store = self._connect()
            looked = time.monotonic()
            while not self._over.wait(self._look_seconds):
                now = time.monotonic()
                # more time has passed when this process was stopped too
                elapsed, looked = min(now - looked, 2 * self._look_seconds), now
                self._look(elapsed)
                if self._place.number == 0 and (nodes := self._listen(elapsed)):
                    self._slow_ranks.see(nodes)
                    if self._hangs(nodes):
                        self._store.set("hang", "")
                if self._store.check(["hang"]):
                    self._end_hang()
                    return

    def _look(self, elapsed: float) -> None:
        """See how far the ranks of this node are, and say it."""
        running = []
        any_begun = any(rank.beat().pid for rank in self._ranks)
        for number, (rank, progress) in enumerate(zip(self._ranks, self._progress, strict=True)):
            beat = rank.beat()
            if beat.pid and not rank.running():
                continue
            running.append(progress)
            # before any rank has begun, what it is forked from imports; what the others do would prove nothing
            if (beat.pid or not any_begun) and progress.silent > self._look_closer:
                progress.see(beat, elapsed, *self._moved(number, beat.pid))
            else:
                self._consumed.pop(number, None)
                progress.see(beat, elapsed)
        silent = min((progress.silent for progress in running), default=None)
        limit = _shortest(progress.limit for progress in running)
        self._looks += 1
        step = min((rank.beat().step for rank in self._ranks), default=0)
        work = [rank.work() for rank in self._ranks]
        said = _said(self._place, self._looks, silent, limit, step, work)
        self._store.set(f"said/{self._place.number}", said)

    def _moved(self, number: int, pid: int) -> tuple[Consumption, Consumption]:
        """What the rank's processes, and those below it, consumed since the look before, if that was closer too.

        `pid` 0: what all processes below this one did.
        """
        below = Consumption.of(descendants(pid or os.getpid()))
        now = (Consumption.of([pid]) + below if pid else below), below
        before = self._consumed.get(number, now)
        self._consumed[number] = now
        return now[0] - before[0], now[1] - before[1]

    def _listen(self, elapsed: float) -> list[dict[str, Any]]:
        """What each node has said last; nothing before ranks are started. On the first node."""
        for number in range(self._place.nodes):
            if self._heard[number] or self._store.check([f"said/{number}"]):
                self._heard[number] = True
                said = self._store.get(f"said/{number}").decode()
            elif any(rank.beat().pid for rank in self._ranks):
                # it was there: torchrun has started ranks
                name = f"node {number + 1} of {self._place.nodes}"
                place = NodePlace(name, number, self._place.nodes, number * len(self._ranks))
                said = _said(place, 0, 0.0, LONGEST_SECONDS)
            else:
                return []
            self._unchanged[number] = self._unchanged[number] + elapsed if said == self._said[number] else 0.0
            self._said[number] = said
        return [json.loads(said) for said in self._said]

    def _hangs(self, nodes: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the job does, as its nodes say."""
        silent = [
            node["silent"] + unchanged
            for node, unchanged in zip(nodes, self._unchanged, strict=True)
            if node["silent"] is not None
        ]
        return bool(silent) and min(silent) > _shortest(node["limit"] for node in nodes)

    def _end_hang(self) -> None:
        """Say what the ranks of this node do; on the first node, report the hang; kill them."""
        self._store.set(f"ranks/{self._place.number}", _RANKS.dump_json(self._states()).decode())
        if self._place.number == 0:
            # the volume may be what hangs
            self._reports = threading.Thread(target=self._report, daemon=True)
            self._reports.start()
        self._await(lambda: self._store.check(["reported"]), 4 * _ANSWER_SECONDS)
        if self._over.is_set():  # what runs now is of the next attempt
            return
        # torchrun would first ask them to end
        if all(rank.beat().pid for rank in self._ranks):
            started = [each for rank in self._ranks if (pid := rank.running()) for each in tree(pid)]
        else:
            started = descendants(os.getpid())
        signal_all(started, signal.SIGKILL)

    def _states(self) -> list[RankState]:
        for rank in self._ranks:
            rank.ask()

        def answered(rank: WatchedRank) -> bool:
            pid = rank.running()
            return not pid or state(pid) in STOPPED or all(rank.answer())

        self._await(lambda: all(map(answered, self._ranks)), _ANSWER_SECONDS)
        states = []
        for number, rank in enumerate(self._ranks, self._place.first_rank):
            beat, (stacks, collectives) = rank.beat(), rank.answer()
            states.append(
                RankState(
                    number,
                    self._place.node,
                    beat.phase,
                    beat.step,
                    (state(rank.running()) or "X") if beat.pid else "",
                    stacks=stacks,
                    collectives=collectives or Collectives(),
                )
            )
        return states

    def _report(self) -> None:
        everyone = range(self._place.nodes)
        self._await(lambda: all(self._store.check([f"ranks/{number}"]) for number in everyone), 2 * _ANSWER_SECONDS)
        ranks: list[RankState] = []
        for number in everyone:
            if self._store.check([f"ranks/{number}"]):
                ranks += _RANKS.validate_json(self._store.get(f"ranks/{number}"))
            else:
                said = json.loads(self._said[number])
                # its ranks cannot say where they are: assume where the first node's are
                silent = RankState(said["first_rank"], said["node"], ranks[0].phase, ranks[0].step, "", answers=False)
                ranks.append(silent)
        found, why = suspect(ranks)
        self.found_hang = True
        directory = hangs(self._run_directory) / time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime())
        print(f"watch: rank {found.rank} on {found.node} hangs {why}", file=sys.stderr)
        print(f"watch: the stacks of all ranks: {directory}", file=sys.stderr, flush=True)
        report_failure(found.rank, KILLED_STATUS, time.time(), why, found.node)
        # the nodes kill now: a slow volume may take longer for the stacks than the supervisor waits for torchrun
        self._store.set("reported", "")
        for rank in [found, *(rank for rank in ranks if rank is not found)]:
            with suppress(OSError):  # the volume may be full
                publish.write_text(directory / f"rank-{rank.rank:05}.txt", rank.text)

    def _await(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(self._look_seconds / 10)
