"""Following a change: what HyperPod answers at first may be the state before the request."""

from collections.abc import Iterator

import pytest

from hyperpod_ft.cluster.hyperpod.waiting import Seen, wait_for_change
from hyperpod_ft.errors import UserError

BEFORE, DURING, AFTER = (
    Seen("old", {"group": "old"}, begun=False, changing=False),
    Seen("old", {"group": "0 of 1"}, begun=True, changing=True),
    Seen("new", {"group": "1 of 1"}, begun=False, changing=False),
)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPERPOD_FT_POLL_SECONDS", "0")


def followed(looks: Iterator[Seen[str]], timeout_seconds: float = 60) -> tuple[tuple[str, bool], list[str]]:
    lines: list[str] = []
    found = wait_for_change(lambda: next(looks), lines.append, timeout_seconds=timeout_seconds, command="hyperpod-ft x")
    return found, lines


def test_the_state_before_the_request_is_neither_its_end_nor_reported() -> None:
    assert followed(iter([BEFORE, BEFORE, DURING, DURING, AFTER])) == (
        ("new", True),
        ["group: 0 of 1", "group: 1 of 1"],
    )


def test_where_nothing_changes_the_wait_ends() -> None:
    assert followed(iter([BEFORE] * 100)) == (("old", False), [])


def test_at_the_timeout_the_state_and_the_command_that_shows_it_are_named() -> None:
    with pytest.raises(UserError, match=r"group: still 0 of 1, after 0 minutes; .*`hyperpod-ft x`"):
        followed(iter([DURING] * 100), timeout_seconds=0)
