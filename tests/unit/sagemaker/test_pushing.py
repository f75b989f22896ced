"""What is pushed while a stage works: an error of one look does not end the next ones."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker import container_commands


def looks(monkeypatch: pytest.MonkeyPatch, outcomes: list[Exception | None]) -> list[str]:
    """`during` of a stage whose state is pushed with these outcomes, the last one after standard input has ended."""
    seen: list[str] = []

    class Store:
        def push_state(self) -> None:
            seen.append("push")
            if error := outcomes.pop(0):
                raise error

    monkeypatch.setattr(container_commands, "_store", lambda run: Store())
    monkeypatch.setattr(container_commands, "_STATE_SECONDS", -1.0)
    monkeypatch.setattr(container_commands.select, "select", lambda *_: ([] if len(outcomes) > 1 else [1], [], []))
    monkeypatch.setattr(container_commands.sys, "stdin", io.StringIO())
    run = cast(Run, SimpleNamespace(config=SimpleNamespace(sagemaker=SimpleNamespace(store="s3://bucket/ft"))))
    container_commands.during(run, "download", 0, 1)
    return seen


def test_what_could_not_be_pushed_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    vanished: Any = FileNotFoundError(2, "No such file", str(Path("/run/attempts/1.json")))
    assert looks(monkeypatch, [vanished, OSError(28, "No space left on device"), None]) == ["push"] * 3
    assert "No space left" in capsys.readouterr().err


def test_the_last_look_reports_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="No space left"):
        looks(monkeypatch, [None, OSError(28, "No space left on device")])
