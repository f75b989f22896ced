"""Which rank of a job that hangs the others wait for: a pure function of what is known of all of them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hyperpod_ft.heartbeat import Collectives, Phase

STOPPED = ("T", "t")
_FRAME = re.compile(r'  File "(?:.*/)?(.+)", line (\d+) in (\S+)')
# where Python waits for other ranks: torch's collectives, and those of engines/ranks.py and stages/train.py
_WAITS = re.compile(r"(distributed_c10d\.py|\bgather \(ranks\.py|_await_layout \(train\.py)")


@dataclass(frozen=True)
class RankState:
    """What is known of a rank of a job that hangs."""

    rank: int
    node: str
    phase: Phase
    step: int  # the last one that is done
    process: str  # as `processes.state`, X: it has ended; empty: its program has not begun
    answers: bool = True  # whether its node does
    stacks: str = ""  # of its threads, as faulthandler writes them
    collectives: Collectives = field(default_factory=Collectives)

    @property
    def frame(self) -> str:
        """Where its main thread is, for example `read (rows.py:12)`; empty if it did not say."""
        main_thread = self.stacks.rpartition("(most recent call first):\n")[2]
        frame = _FRAME.match(main_thread)
        return f"{frame[3]} ({frame[1]}:{frame[2]})" if frame else ""

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return bool(self.collectives.waiting or _WAITS.search(self.frame))

    @property
    def where(self) -> str:
        """For example `in step 13`."""
        return {
            "start": "before its first step",
            "step": f"in step {self.step + 1}",
            "validation": f"in the validation after step {self.step}",
            "save": f"while it saves step {self.step}",
            "end": "after its last step",
            "waiting": "",
        }[self.phase]

    @property
    def text(self) -> str:
        """For its file of the run."""
        lines = [f"rank {self.rank} on {self.node}, {self.where}; its process: {self.process or 'has not begun'}"]
        lines += (f"waits in {each.name} of group {each.group}" for each in self.collectives.waiting)
        return "\n".join([*lines, self.stacks])


def suspect(ranks: Sequence[RankState]) -> tuple[RankState, str]:
    """The rank that the others wait for, and what shows it: for example `in step 13: its process is stopped`.

    `ranks`: at least one.
    """
    found, why = _suspect(ranks)
    return found, f"{found.where}: {why}{f', at {found.frame}' if found.frame else ''}"


def _suspect(ranks: Sequence[RankState]) -> tuple[RankState, str]:
    for rank in ranks:
        if not rank.answers:
            return rank, "its node does not answer"
        if rank.process in STOPPED:
            return rank, "its process is stopped"
        if not rank.process:
            return rank, "its program has not begun"
    # one that is behind, and waits, is behind because of others; one that has ended may have done its part
    found = min(ranks, key=lambda rank: (rank.waits, rank.process == "X", rank.process != "D", rank.step))
    if not found.waits:
        if found.process == "D":
            return found, "it waits for a device or volume"
        return found, "others wait for it" if any(rank.waits for rank in ranks) else "it does not go on"
    # of those that keep others waiting: who skipped a collective is ahead of them, and the wait that began first is no
    # consequence of another
    blamed = []
    for waiting in (each for rank in ranks for each in rank.collectives.waiting):
        begun = [
            (rank.collectives.begun[waiting.group], rank) for rank in ranks if waiting.group in rank.collectives.begun
        ]
        most = max(number for number, _ in begun)
        blamed += [(-rank.step, waiting.begun_at, rank.rank, rank, waiting) for number, rank in begun if number < most]
    if blamed:
        *_, rank, waiting = min(blamed, key=lambda each: each[:3])
        return rank, f"it has not begun a collective, {waiting.name}, in which others wait"
    return found, "all ranks wait for each other"
