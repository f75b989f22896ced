"""What is printed of a sweep, and its report."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from hyperpod_ft.cli.sweep import show
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.report.page import report_page
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sweep.results import PointResult, SweepResult, sweep_reports
from hyperpod_ft.sweep.sweep import Point, Sweep


def test_reports_of_a_sweep_are_named_after_what_varies(make_run: Callable[..., Run]) -> None:
    runs = [make_run(training__learning_rate=rate) for rate in (0.2, 0.1)]
    for run in runs:
        run.freeze()
        run.journal.add_job(Job("env", "p1", "process", "2026-01-01T00:00:00Z"))
    points = [
        Point({"training.learning_rate": rate, "seed": 7}, run.paths.full_name, "")
        for rate, run in zip((0.2, 0.1), runs, strict=True)
    ]
    sweep = Sweep(runs[0].paths.root, "rates", None, "process", tuple(points))
    page = report_page(sweep_reports(sweep, Launchers()))
    assert "learning_rate 0.2, seed 7" in page and "learning_rate 0.1, seed 7" in page
    alone = Sweep(runs[0].paths.root, "rates", None, "process", tuple(points[:1]))
    assert [report.name for report in sweep_reports(alone, Launchers())] == [runs[0].paths.full_name]


def test_the_limit_is_one_of_trainings_and_a_best_point_may_change(capsys: pytest.CaptureFixture[str]) -> None:
    done = PointResult(1, {}, "a/b", "/fsx/runs/a/b", "done", "", 2, 2, 1.0, 1.0)
    result = SweepResult("rates", "/fsx/sweeps/rates", 1, (), (done, replace(done, number=2, state="running")), 1, "")
    show.status(result)
    printed = capsys.readouterr().out
    assert "1 training at a time" in printed and "so far" in printed
    show.status(replace(result, points=(done,), runs_at_a_time=None))
    printed = capsys.readouterr().out
    assert "at a time" not in printed and "so far" not in printed
