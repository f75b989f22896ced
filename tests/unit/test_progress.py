"""What is shown while work is under way."""

import io

import pytest

from hyperpod_ft import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_activity_leaves_nothing_on_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    with pytest.raises(ImportError), progress.activity("loading"):
        assert screen.getvalue() == "loading"
        raise ImportError
    assert screen.getvalue().split("\r\x1b[K") == ["loading", ""], "erased, and the cursor back where it was"


def test_an_activity_is_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.activity("loading"):
        pass
    assert capsys.readouterr().err == ""


def test_a_state_is_reported_once_until_it_changes() -> None:
    lines: list[str] = []
    report = progress.ChangeReporter(lines.append)
    for name, state, before in (("a", "1", ""), ("b", "1", "after 1 min: "), ("a", "1", ""), ("b", "1", "later: ")):
        report(name, state, before)
    report("a", "2")
    assert lines == ["a: 1", "b: after 1 min: 1", "a: 2"]


def test_durations_are_short() -> None:
    durations = [progress.format_duration(seconds) for seconds in (0, 5, 59.6, 80, 7260)]
    assert durations == ["0s", "5s", "1m00s", "1m20s", "2h01m"]
