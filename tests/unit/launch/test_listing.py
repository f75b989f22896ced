"""What `list` reads and asks for many runs."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.run_directories import write_runs
from hyperpod_ft import publish
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.listing import list_runs
from hyperpod_ft.launch.slurm import programs
from hyperpod_ft.launch.status import status, status_of
from hyperpod_ft.runs.cached_run import CachedRun
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.run import Run


def test_a_listing_is_what_status_says_and_asks_slurm_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = list(write_runs(tmp_path, 14))
    requeued, failed, early = runs[7], runs[11], runs[13]
    answer = "\n".join(
        f"{run.latest_jobs()[stage].job_id}|RUNNING|None|0:10|node1|{run.job_name(stage)}|{requeued.job_comment}"
        for run, stage in ((requeued, "train"), (failed, "merge"))
    )
    asked: list[str] = []

    def no_slurm_here(arguments: list[str], *_: object, **__: object) -> subprocess.CompletedProcess[str]:
        asked.append(arguments[0])
        return subprocess.CompletedProcess(arguments, 0, answer if arguments[0] == "squeue" else "", "")

    monkeypatch.setattr(programs, "run", no_slurm_here)
    monkeypatch.setattr("shutil.which", lambda _: None)  # sacct
    listed = {Path(current.directory): current for current in list_runs(tmp_path)}
    assert asked == ["squeue", "scontrol"], "for three runs"
    assert listed == {run.directory: status(run, Launchers.of(run)) for run in runs}
    assert listed[requeued.directory].state == "running"
    for run, stage in ((failed, "merge"), (early, "dataset")):
        found = listed[run.directory].failed
        assert found is not None and found.stage == stage, "a job of another run has the id"


def test_stages_with_one_job_id_of_slurm_are_two_jobs(make_run: Callable[..., Run]) -> None:
    """Slurm was set up anew between two submissions, and counts from 1 again."""
    run = make_run()
    run.freeze()
    for stage, day in (("train", 1), ("merge", 2)):
        run.add_job(Job(stage, "4", "slurm", f"2026-01-0{day}T00:00:00Z"))
        publish.write_text(run.exit_marker(stage, "4"), "1")
    found = {stage.stage: stage.state for stage in status_of(CachedRun.now(run), {}).stages}
    assert (found["train"], found["merge"]) == ("failed", "failed")
