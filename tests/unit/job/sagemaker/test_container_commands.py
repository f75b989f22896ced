"""The command line of container_commands.py: which status it exits with, and what its error names."""

import sys
from collections.abc import Callable

import pytest

from hyperpod_ft.errors import EXIT_USER_ERROR, UserError
from hyperpod_ft.job.sagemaker import container_commands
from hyperpod_ft.runs.run import Run
from tests.unit.stage_runs import finish


@pytest.fixture
def run(make_run: Callable[..., Run]) -> Run:
    made = make_run()
    made.freeze()
    return made


def status(monkeypatch: pytest.MonkeyPatch, command: str, run: Run, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["container_commands", command, str(run.directory), *arguments])
    try:
        return container_commands.main()
    except SystemExit as exited:
        assert isinstance(exited.code, int)
        return exited.code


def test_the_exit_status_says_whether_a_stage_is_done(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert status(monkeypatch, "is-done", run, "download") == 1
    finish(run, "download")
    assert status(monkeypatch, "is-done", run, "download") == 0


def test_numbers_reach_a_command_of_a_stage(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setitem(container_commands._STAGE_COMMANDS, "during", lambda _, *given: calls.append(given))
    assert status(monkeypatch, "during", run, "train", "1", "2") == 0
    assert calls == [("train", 1, 2)]


def test_an_unknown_command_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError, match="afterwards"):
        status(monkeypatch, "afterwards", run, "train")


@pytest.mark.parametrize(
    ("command", "arguments", "named"),
    [
        ("before", ["train"], "train"),
        ("after", ["merge"], "merge"),
        ("state", [], "state"),
        ("advance", ["x-train-1"], "advance"),
        ("pull-run", ["/elsewhere", "s3://bucket/ft"], "pull-run"),
    ],
)
def test_an_error_names_the_stage_or_the_command(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    arguments: list[str],
    named: str,
) -> None:
    def refuse(*_: object) -> None:
        raise UserError("no such bucket")

    for table in (container_commands._STAGE_COMMANDS, container_commands._RUN_COMMANDS):
        for name in table:
            monkeypatch.setitem(table, name, refuse)
    monkeypatch.setattr(container_commands, "pull_run", refuse)
    assert status(monkeypatch, command, run, *arguments) == EXIT_USER_ERROR
    assert capsys.readouterr().err == f"error: {named}: no such bucket\n"
