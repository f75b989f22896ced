"""Which rank of a training works longest in a step, over time: a file to which the watch over the ranks adds rows."""

import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, TypeAdapter

from hyperpod_ft import publish
from hyperpod_ft.runs.results.usage import Words

_SLOW = 1.15  # times the work of others, and at least so many seconds more: the shortest steps vary as much
_SLOW_SECONDS = 0.01
_SHARE = 200  # in a long training, rows are this share of its steps apart, so that they stay few

_Count = Annotated[int, Field(ge=0, lt=1 << 53)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class SlowestRank:
    """The rank that works longest, by medians of the last 50 steps; what a rank waits for others is no work."""

    job_id: Words
    step: _Count  # the last of them
    rank: _Count
    node: Words
    several_nodes: bool  # whether the others are the ranks of other nodes; else those of the same one
    seconds: _Seconds  # of work in a step
    others: _Seconds  # the same, of the others: their median

    @property
    def place(self) -> str:
        """What to look at: the node if there are several, else the rank."""
        return self.node if self.several_nodes else f"rank {self.rank}"

    @property
    def excess(self) -> float:
        """How much longer it works than the others, as a share of their time."""
        return self.seconds / self.others - 1

    @property
    def is_slow(self) -> bool:
        return self.seconds >= max(_SLOW * self.others, self.others + _SLOW_SECONDS)

    def __str__(self) -> str:
        others = "ranks of other nodes" if self.several_nodes else "the other ranks"
        return (
            f"rank {self.rank} on {self.node} is slow: it works {self.seconds:.3g} s a step, {others}"
            f" {self.others:.3g} s (medians of 50 steps, to step {self.step})"
        )


class RankWork(NamedTuple):
    """How long a rank works in a step, in seconds."""

    rank: int
    node: str
    seconds: float


def slowest(ranks: Sequence[RankWork], job_id: str, step: int) -> SlowestRank | None:
    """The rank that works longest, the first of several; None if there is no other to compare it with.

    `ranks`: at least one.
    """
    found = max(ranks, key=lambda rank: rank.seconds)
    several_nodes = any(rank.node != found.node for rank in ranks)
    others = [rank.seconds for rank in ranks if (rank.node != found.node if several_nodes else rank is not found)]
    if not others:
        return None
    middle = statistics.median(others)
    return SlowestRank(job_id, step, found.rank, found.node, several_nodes, found.seconds, middle)


_ROW = TypeAdapter(SlowestRank)


def read(path: Path) -> list[SlowestRank]:
    """The rows, oldest first, without damaged ones; none without the file. Raises OSError if it cannot be read.

    After a restart, steps that are trained again come again.
    """
    found = []
    with suppress(FileNotFoundError):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):
                found.append(_ROW.validate_json(line))
    return found


def add(path: Path, row: SlowestRank) -> bool:
    """Add the row, if it is due. Returns whether it is the one that shows its place to be slow, first in its job."""
    rows = read(path)
    if rows and 0 <= row.step - rows[-1].step < row.step // _SHARE:
        return False
    publish.write_bytes(path, b"".join(_ROW.dump_json(each) + b"\n" for each in [*rows, row]))
    of_job = [each for each in rows if each.job_id == row.job_id]
    return len(slow([*of_job, row])) > len(slow(of_job))


def slow(rows: Sequence[SlowestRank]) -> tuple[SlowestRank, ...]:
    """The newest row of each place that was slow in two rows running: on a busy machine, one alone may be chance."""
    found = {}
    for before, row in pairwise(rows):
        same = (before.job_id, before.node, before.place) == (row.job_id, row.node, row.place)
        if same and before.is_slow and row.is_slow:
            found[row.place] = row
    return tuple(found.values())
