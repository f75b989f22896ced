"""What `list` reads and asks for many runs."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.run_directories import write_runs
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.listing import list_runs
from hyperpod_ft.launch.slurm import programs
from hyperpod_ft.launch.status import status


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
