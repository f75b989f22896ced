"""The command line of container_commands.py: which status it exits with, and what its error names."""

import sys
from collections.abc import Callable

import pytest

from hyperpod_ft import publish
from hyperpod_ft.errors import EXIT_USER_ERROR, UserError
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker import container_commands
from hyperpod_ft.sagemaker.groups import job_name
from hyperpod_ft.sagemaker.section import SAGEMAKER
from tests.unit.sagemaker.training_jobs_in_memory import FSX


@pytest.fixture
def run(make_run: Callable[..., Run]) -> Run:
    made = make_run()
    made.freeze()
    return made


def status(monkeypatch: pytest.MonkeyPatch, command: str, run: Run, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["container_commands", command, str(run.paths.directory), *arguments])
    try:
        return container_commands.main()
    except SystemExit as exited:
        assert isinstance(exited.code, int)
        return exited.code


def test_a_cancelled_job_does_not_begin(make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(sagemaker=FSX, cluster__instance_type="c7i.4xlarge")
    run.freeze()
    first, second = (job_name(run, "train", number) for number in (1, 2))
    for job in (first, second):
        run.journal.add_job(Job("train", job, SAGEMAKER, "2026-01-01T00:00:00Z"))
    assert status(monkeypatch, "refuse-cancelled", run, second) == 0
    publish.write_text(run.paths.cancel_marker("train", first), "")
    assert status(monkeypatch, "refuse-cancelled", run, second) == EXIT_USER_ERROR


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
