"""A sweep with launcher process: the limit, what is shared, failures, and what the commands print."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from hyperpod_ft.cli.main import app
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.interface import JobState
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.process.launcher import ProcessLauncher
from hyperpod_ft.launch.submit import create_run_directory
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.records import Record, utc_now
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sweep.planning import PlannedSweep, find_sweep, plan_sweep
from hyperpod_ft.sweep.results import SweepResult, sweep_result
from hyperpod_ft.sweep.submission import resume_sweep, submit_sweep
from hyperpod_ft.sweep.sweep import Sweep
from tests.conftest import run_file_values
from tests.quick_stages import interpreter, most_at_a_time
from tests.unit.stage_runs import finish, finish_all
from tests.waiting import wait_for


def sweep_of(directory: Path, launcher: str = "process", **changes: Any) -> PlannedSweep:
    values = run_file_values(directory / "root", env__python=str(interpreter(directory)))
    values["model"], values["dataset"] = {"source": "example:tiny-llama"}, {"source": "example:qa", "format": "dolly"}
    values["parallelism"] = {"ranks_per_node": 1, "tensor_parallel": 1}
    (directory / "run.yaml").write_text(yaml.safe_dump(values))
    sweep = {"name": "rates", "run": "run.yaml", "runs_at_a_time": 1, "grid": {"training.learning_rate": [0.2, 0.1]}}
    (directory / "sweep.yaml").write_text(yaml.safe_dump(sweep | changes))
    return plan_sweep(directory / "sweep.yaml", launcher)


def ended(sweep: Sweep) -> SweepResult:
    """The result once nothing is at work."""

    def at_rest() -> bool:
        if {point.state for point in sweep_result(sweep, Launchers()).points} & {"pending", "running"}:
            return False
        # the job of a run's last stage ends a moment after its stage
        runs = filter(None, map(sweep.open_if_intact, sweep.points))
        return not any(Launchers().active(run) for run in runs)

    wait_for(at_rest, what=lambda: sweep_result(sweep, Launchers()), every=0.1)
    return sweep_result(sweep, Launchers())


def command(*arguments: str) -> int:
    try:
        return int(app(["sweep", *arguments], standalone_mode=False) or 0)
    except typer.Exit as end:
        return end.exit_code


def test_runs_wait_for_one_another_and_for_what_they_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = sweep_of(tmp_path)
    sweep, root = planned.sweep, planned.sweep.root
    (tmp_path / "root").mkdir()
    (root / "fail-dataset").touch()
    assert command("plan", str(tmp_path / "sweep.yaml")) == 0
    assert "train consolidate merge generate" in capsys.readouterr().out.splitlines()[-1], "the second shares the rest"
    assert command(str(tmp_path / "sweep.yaml"), "--launcher", "process") == 0
    assert "1/2" in capsys.readouterr().out
    assert [point.state for point in ended(sweep).points] == ["failed", "cancelled"]
    assert command("status") == 1
    assert "hyperpod-ft sweep resume" in capsys.readouterr().out
    (root / "fail-dataset").unlink()

    assert [len(done.jobs) for done in resume_sweep(find_sweep(None), Launchers())] == [5, 4]
    with pytest.raises(UserError, match="no longer in the file"):
        list(submit_sweep(sweep_of(tmp_path, grid={"training.learning_rate": [0.2]}), Launchers()))
    result = ended(sweep)
    assert [point.state for point in result.points] == ["done", "done"]
    assert result.best == 2
    assert most_at_a_time(root) == 1
    assert command("status", str(tmp_path / "sweep.yaml")) == 0
    shown = capsys.readouterr().out
    assert "Best validation loss: 0.1000, point 2" in shown and "2 done" in shown
    assert command("resume") == 0
    assert "Already done: 2 of 2 runs" in capsys.readouterr().out
    assert command("cancel") == 0
    assert "nothing to cancel" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    assert command("report") == 0
    page = (tmp_path / "sweep-report.html").read_text()
    assert not (tmp_path / "report.html").exists(), "that of `report`"
    assert all(point.run in page for point in result.points)


def test_a_shared_job_that_can_never_start_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The download that it waits for has failed. Its run must not wait for the job that was cancelled."""
    cancelled: list[Job] = []

    class Waiting(ProcessLauncher):
        """Has one job, which waits; takes stages instead of starting them."""

        def states(self, run: Run, jobs: Sequence[Job]) -> dict[Job, JobState]:
            left = [job for job in jobs if job.job_id == "stuck" and job not in cancelled]
            return dict.fromkeys(left, JobState("PENDING"))

        def cancel(self, run: Run, jobs: Sequence[Job]) -> None:
            cancelled.extend(jobs)

        def submit(self, run: Run, stages: Any, after: object) -> None:
            for stage in stages:
                run.journal.add_job(Job(stage.name, f"new-{stage.name}", self.name, utc_now()))

    planned = sweep_of(tmp_path)
    create_run_directory(planned.runs[0])
    planned.runs[0].journal.add_job(Job("dataset", "stuck", "process", utc_now()))
    first = next(submit_sweep(planned, Launchers((Waiting(),))))
    assert [job.job_id for job in cancelled] == ["stuck"]
    assert [job.stage for job in first.jobs] == [stage.name for stage in planned.runs[0].plan.stages]


def test_losses_over_different_rows_have_no_best_point(tmp_path: Path) -> None:
    def trained(grid: dict[str, list[object]], first: float = 2.0) -> SweepResult:
        planned = sweep_of(tmp_path, grid=grid)
        for number, run in enumerate(planned.runs):
            run.freeze()
            facts = {"validation_loss": 2.0 - number if number else first, "best_validation_loss": 1.0 + number}
            record = Record("train", run.plan["train"].fingerprint, {}, (), facts, utc_now(), 1.0, "test", "1")
            record.write(run.paths.record_path("train"))
        return sweep_result(planned.sweep, Launchers())

    assert trained({"training.learning_rate": [0.1, 0.2]}).best == 2
    kept = trained({"training.keep_best": [True], "training.validate_every_steps": [1], "seed": [1], "lora.r": [4, 8]})
    assert [point.validation_loss for point in kept.points] == [1.0, 2.0], "of the weights that were kept"
    assert kept.best == 1
    assert trained({"training.learning_rate": [9.0, 0.2]}, math.nan).best == 2, "the first one has diverged"
    different = trained({"dataset.max_length": [128, 256]})
    assert [point.validation_loss for point in different.points] == [2.0, 1.0]
    assert different.best is None and "datasets differ" in different.note


def test_no_point_is_trained_again_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its model and checkpoints were cleaned. The other points go on."""
    planned = sweep_of(tmp_path)
    cleaned = planned.runs[0]
    cleaned.freeze()
    finish_all(cleaned)
    for stage in ("train", "consolidate", "merge"):
        output = cleaned.paths.directory / f"output-of-{stage}"
        output.touch()
        finish(cleaned, stage, output)
        output.unlink()
    assert command(str(tmp_path / "sweep.yaml"), "--launcher", "process") == 0
    ended(planned.sweep)
    said = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("1/2"))
    assert f"hyperpod-ft submit {cleaned.paths.config_path} --from train" in said
    assert [point.jobs == () for point in resume_sweep(planned.sweep, Launchers())] == [True, True]
    assert cleaned.plan.run_id not in (planned.sweep.root / "trained").read_text()
    assert all(planned.runs[1].journal.is_done(stage.name) for stage in planned.runs[1].plan.stages)


def test_training_jobs_wait_for_no_other_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="sagemaker"):
        next(submit_sweep(sweep_of(tmp_path, "sagemaker"), Launchers()))
    assert not (tmp_path / "root").exists()
