"""What `list` reads and asks for many runs."""

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.run_directories import write_runs
from hyperpod_ft import publish
from hyperpod_ft.cli.output import show_runs
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.render import slurm_job_comment, slurm_job_name
from hyperpod_ft.launch.slurm import programs
from hyperpod_ft.launch.status import RunStatus, list_runs, status, status_of
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.run import Run
from hyperpod_ft.serving.view import Pages
from tests.unit.stage_runs import finish


def test_a_listing_is_what_status_says_and_asks_slurm_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = list(write_runs(tmp_path, 14))
    requeued, failed, early = runs[7], runs[11], runs[13]
    answer = "\n".join(
        f"{run.journal.latest_jobs()[stage].job_id}|RUNNING|None|0:10|node1|"
        f"{slurm_job_name(run.config, stage)}|/|{slurm_job_comment(requeued.paths)}"
        for run, stage in ((requeued, "train"), (failed, "merge"))
    )
    asked: list[str] = []

    def no_slurm_here(arguments: list[str], *_: object, **__: object) -> subprocess.CompletedProcess[str]:
        asked.append(arguments[0])
        return subprocess.CompletedProcess(arguments, 0, answer if arguments[0] == "squeue" else "", "")

    monkeypatch.setattr(programs, "run", no_slurm_here)
    monkeypatch.setattr("shutil.which", lambda _: None)  # sacct
    listed = {Path(current.directory): current for current in list_runs(tmp_path, Launchers())}
    assert asked == ["squeue", "scontrol"], "for three runs"
    assert listed == {run.paths.directory: status(run, Launchers()) for run in runs}
    assert listed[requeued.paths.directory].state == "running"
    for run, stage in ((failed, "merge"), (early, "dataset")):
        found = listed[run.paths.directory].failed
        assert found is not None and found.stage == stage, "a job of another run has the id"


@pytest.mark.parametrize("content", [b"\xff", "\N{SUPERSCRIPT TWO}".encode(), b"", None])
def test_a_damaged_exit_status_is_a_failure_and_ends_no_list(
    make_run: Callable[..., Run], content: bytes | None
) -> None:
    good, bad = make_run(), make_run(name="bad")
    for run in (good, bad):
        run.freeze()
        run.journal.add_job(Job("train", "7", "slurm", "2026-01-01T00:00:00Z"))
    marker = bad.paths.exit_marker("train", "7")
    if content is None:
        marker.mkdir(parents=True)
    else:
        publish.write_text(marker, "")
        marker.write_bytes(content)
    states = {run.config.name: status_of(run, Launchers(), run.journal.latest_jobs(), {}).state for run in (good, bad)}
    assert states["bad"] == "failed" != states[good.config.name]
    assert len(list_runs(good.paths.root, Launchers())) == 2


@pytest.mark.parametrize("value", ["10**400", "2026-02-31", "Infinity"])
def test_values_that_nothing_can_compute_with_end_no_list(
    make_run: Callable[..., Run], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    run.freeze()
    if value == "10**400":
        finish(run, "dataset")
        finish(run, "train")
        for stage, facts in {"dataset": ("train_rows",), "train": ("seconds", "mfu", "final_loss")}.items():
            record = run.journal.record(stage)
            assert record
            replace(record, facts=dict.fromkeys(facts, 10**400)).write(run.paths.record_path(stage))
    else:
        publish.write_text(run.paths.metrics_path, '{"step": 1, "loss": 2.0}\n')
        job = {"stage": "train", "job_id": "7", "launcher": "slurm", "submitted": "2026-01-01T00:00:00Z"}
        if value == "2026-02-31":
            job["submitted"] = "2026-02-31T00:00:00Z"
        publish.write_json(run.paths.jobs_path, [job])
        failure = '[{"node": "a", "rank": 0, "status": 1, "time": Infinity}]'
        publish.write_text(
            run.paths.restarts_path("train"),
            '[{"job_id": "7", "time": "2026-01-01T00:00:00Z", "status": 1, "recorded": false, "failures": '
            f'{failure}, "signal": 0, "resumed_from": 0, "checkpoint": 0, "step": 0}}]',
        )
    show_runs.runs(run.paths.root, list_runs(run.paths.root, Launchers()))
    if value == "2026-02-31":
        assert "jobs.json: is damaged" in capsys.readouterr().err
    else:
        status(run, Launchers())


@pytest.mark.parametrize("damage", ["{", '[{"stage": "env", "job_id": "../x"}]', None])
def test_a_run_that_somebody_damaged_is_left_out(
    make_run: Callable[..., Run], damage: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = make_run(), make_run(name="bad")
    for run in (good, bad):
        run.freeze()
    if damage is None:
        bad.paths.jobs_path.mkdir()
    else:
        bad.paths.jobs_path.write_text(damage)
    assert [current.directory for current in list_runs(good.paths.root, Launchers())] == [str(good.paths.directory)]
    assert str(bad.paths.jobs_path) in capsys.readouterr().err
    page = Pages(good.paths.root, Launchers).all_runs().decode()
    assert good.paths.full_name in page and bad.paths.full_name not in page


def test_a_stage_that_ends_while_slurm_is_asked_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run,) = write_runs(tmp_path, 1)
    record, not_yet = run.paths.record_path("merge"), tmp_path / "record"

    def ends_now(arguments: list[str], *_: object, **__: object) -> subprocess.CompletedProcess[str]:
        if not_yet.exists():
            not_yet.rename(record)
        return subprocess.CompletedProcess(arguments, 0, "", "")

    monkeypatch.setattr(programs, "run", ends_now)
    monkeypatch.setattr("shutil.which", lambda _: None)  # sacct
    looks: list[Callable[[], RunStatus]] = [
        lambda: list_runs(tmp_path, Launchers())[0],
        lambda: status(run, Launchers()),
    ]
    for look in looks:
        record.rename(not_yet)
        assert (look().state, not_yet.exists()) == ("done", False)


def test_stages_with_one_job_id_of_slurm_are_two_jobs(make_run: Callable[..., Run]) -> None:
    """Slurm was set up anew between two submissions, and counts from 1 again."""
    run = make_run()
    run.freeze()
    for stage, day in (("train", 1), ("merge", 2)):
        run.journal.add_job(Job(stage, "4", "slurm", f"2026-01-0{day}T00:00:00Z"))
        publish.write_text(run.paths.exit_marker(stage, "4"), "1")
    found = {stage.stage: stage.state for stage in status_of(run, Launchers(), run.journal.latest_jobs(), {}).stages}
    assert (found["train"], found["merge"]) == ("failed", "failed")
