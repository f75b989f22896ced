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


def test_durations_are_short() -> None:
    durations = [progress.format_duration(seconds) for seconds in (0, 5, 59.6, 80, 7260)]
    assert durations == ["0s", "5s", "1m00s", "1m20s", "2h01m"]
