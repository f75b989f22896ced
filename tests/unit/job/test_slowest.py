"""Which rank is slow, when that is said, and what is kept of it."""

from pathlib import Path

import pytest

from hyperpod_ft.job.watch import SlowRanks
from hyperpod_ft.runs.job_files import slowest_ranks
from hyperpod_ft.runs.results import slowest_rank
from hyperpod_ft.runs.results.slowest_rank import RankWork, slowest
from tests.waiting import wait_for


def works(*nodes: list[float]) -> list[RankWork]:
    """The ranks of nodes, by the seconds that each works in a step."""
    of_nodes = [(f"node{number}", seconds) for number, node in enumerate(nodes, 1) for seconds in node]
    return [RankWork(rank, node, seconds) for rank, (node, seconds) in enumerate(of_nodes)]


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        (works([1.0, 1.0, 1.2]), (2, 1.0, True)),
        (works([1.0, 1.0, 1.14]), (2, 1.0, False)),
        # of ranks that work as long, the first
        (works([1.0, 1.0]), (0, 1.0, False)),
        # one slow rank keeps all waiting, however fast the others of its node are
        (works([1.0, 1.0], [1.0, 1.3], [1.1, 1.1]), (3, 1.05, True)),
        # all of a node are compared with those of others, not with each other
        (works([1.0, 1.0], [1.3, 1.3]), (2, 1.0, True)),
        # the shortest steps vary by as much
        (works([0.010, 0.015]), (1, 0.010, False)),
        (works([0.010, 0.025]), (1, 0.010, True)),
    ],
)
def test_who_is_slow(ranks: list[RankWork], found: tuple[int, float, bool]) -> None:
    row = slowest(ranks, "7", 50)
    assert row and (row.rank, row.others, row.is_slow) == found


def test_a_rank_alone_is_compared_with_nobody() -> None:
    assert slowest(works([1.0]), "7", 50) is None


class Watched:
    """What two nodes of two ranks say, and what becomes of it."""

    def __init__(self, directory: Path) -> None:
        self.path, self.ranks = slowest_ranks(directory), SlowRanks(directory)

    def see(self, step: int, *work: float) -> list[slowest_rank.SlowestRank]:
        self.ranks.see(
            [
                {"node": "node1", "first_rank": 0, "step": step + 1, "work": work[:2]},
                {"node": "node2", "first_rank": 2, "step": step, "work": work[2:]},
            ]
        )
        wait_for(lambda: not (self.ranks._adds and self.ranks._adds.is_alive()))
        return slowest_rank.read(self.path)


def test_a_node_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watched = Watched(tmp_path)
    assert watched.see(60, 1.0, 1.0, 0.0, 0.0) == watched.see(60, 1.0, 1.0) == [], "its ranks have made few steps"
    (row,) = watched.see(70, 1.0, 1.0, 1.0, 1.3)
    assert watched.see(119, 1.0, 1.0, 9.0, 9.0) == [row], "a part of these steps was seen"
    assert capsys.readouterr().err == "", "once may be chance"
    assert len(watched.see(120, 1.0, 1.0, 1.31, 1.3)) == 2
    watched.see(170, 1.0, 1.0, 1.3, 1.4)
    said = (
        "rank 2 on node2 is slow: it works 1.31 s a step, ranks of other nodes 1 s (medians of 50 steps, to step 120)"
    )
    assert capsys.readouterr().err == f"watch: {said}\n"
    # the next attempt of the job resumes from an earlier step
    watched = Watched(tmp_path)
    for step in (140, 190):
        watched.see(step, 1.0, 1.0, 1.4, 1.3)
    assert capsys.readouterr().err == ""
    watched.see(240, 2.0, 1.0, 1.0, 1.0)
    rows = watched.see(290, 2.0, 1.0, 1.0, 1.0)
    assert capsys.readouterr().err.startswith("watch: rank 0 on node1 is slow: ")
    assert [(row.step, row.rank) for row in slowest_rank.slow(rows)] == [(190, 2), (290, 0)]


def test_rows_are_few_and_damaged_ones_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    steps = [50, 100, 100_000, 100_450, 100_600, 100_050]  # the last one after a restart
    for step in steps:
        row = slowest(works([1.0, 1.0]), "7", step)
        assert row and not slowest_rank.add(path, row)
    rows = slowest_rank.read(path)
    assert [row.step for row in rows] == [step for step in steps if step != 100_450]
    text = path.read_text()
    for damaged in ('"node1"', '"\\u001b[2J"'), ("1.0", "Infinity"), ("1.0", "-1"), ("50", "5" * 5000), ("}", ""):
        path.write_text(text.replace(*damaged, 1) + '{"step"')
        assert len(slowest_rank.read(path)) == len(rows) - 1
