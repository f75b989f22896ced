"""A training and its trackers, below the supervisor: with TensorBoard's package, and with a program that hangs."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hyperpod_ft.processes import descendants, is_running
from hyperpod_ft.runs.run import Run
from hyperpod_ft.tracking.content import TrackerState
from tests.programs import Started, start_module
from tests.unit.tracking.conftest import MakeRun, finish, log, losses, tracked
from tests.waiting import wait_for

__all__ = ["tracked"]  # a fixture

IMPATIENT = """
import sys
from hyperpod_ft.job import supervisor, tracking
tracking._LAST_SECONDS = 1
sys.exit(supervisor.main())
"""


def supervise(run: Run, command: str, impatient: bool = False) -> Started:
    program = ["-c", IMPATIENT] if impatient else ["hyperpod_ft.job.supervisor"]
    environment = {**os.environ, "HYPERPOD_FT_JOB_ID": "7"}
    arguments = ["train", str(run.paths.directory), "bash", "-c", command]
    return start_module(run.paths.directory, environment, *program, *arguments)


def training(run: Run, tmp_path: Path) -> str:
    """A command that crashes after three of six steps; restarted from step 2, it makes the third again and ends."""
    log(run, range(1, 4))
    first = run.paths.metrics_path.rename(tmp_path / "first")
    log(run, range(1, 7))
    second = run.paths.metrics_path.rename(tmp_path / "second")
    finish(run, final_loss=0.25)
    record = run.paths.record_path("train").rename(tmp_path / "record")
    there = shlex.quote(str(run.paths.record_path("train")))
    return (
        f"if [[ ! -e tried ]]; then touch tried; cp {first} metrics.jsonl; exit 9; fi;"
        f"cp {second} new; mv new metrics.jsonl; cp {record} {there}.new; mv {there}.new {there}"
    )


def test_a_training_that_crashes_once_is_published_without_gaps_and_doubles(tracked: MakeRun, tmp_path: Path) -> None:
    run = tracked("tensorboard")
    # the supervisor gives the tracker half a minute after the end, in which a busy machine may not even have started it
    until = f"until grep -qs '\"step\": 3' {run.paths.tracking / 'tensorboard.json'}; do sleep 0.05; done"
    command = f"if [[ -e tried ]]; then {until}; fi; {training(run, tmp_path)}"
    output, _ = supervise(run, command).communicate(timeout=300)
    assert "restart 1 of 3" in output
    assert f"tracking: tensorboard: published to step 6 {run.paths.tracking / 'tensorboard'}\n" in output
    assert losses(run) == [(step, pytest.approx(2 / step)) for step in range(1, 7)]
    assert TrackerState.read(run, "tensorboard").final == {"final/final_loss": 0.25}


def test_a_tracker_that_hangs_neither_fails_nor_holds_a_training(tracked: MakeRun, tmp_path: Path) -> None:
    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/bash\necho $$ >pid\nexec sleep 1000\n")
    hangs.chmod(0o755)
    run = tracked("mlflow", python=str(hangs))
    # the rows of the first attempt have the tracker started; until it hangs, there is nothing to test
    command = f"if [[ -e tried ]]; then until [[ -s tracking/pid ]]; do sleep 0.05; done; fi; {training(run, tmp_path)}"
    process = supervise(run, command, impatient=True)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert "published to step" not in output, "the follower gives itself 30 s, and was not waited for"
    wait_for(lambda: not is_running(int((run.paths.tracking / "pid").read_text())))
    assert run.journal.is_done("train") and run.paths.exit_marker("train", "7").read_text() == "0\n"


def test_a_damaged_run_is_named(tracked: MakeRun) -> None:
    run = tracked("tensorboard")
    run.paths.plan_path.write_text("{")
    program = [sys.executable, "-m", "hyperpod_ft.tracking.follower", str(run.paths.directory)]
    done = subprocess.run(program, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: tracking: ") and "its plan.json is missing or damaged; " in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_nothing_is_left_when_the_supervisor_is_killed(tracked: MakeRun, tmp_path: Path) -> None:
    run = tracked("tensorboard")
    log(run, range(1, 4))
    process = supervise(run, "exec sleep 1000")
    wait_for(lambda: TrackerState.read(run, "tensorboard").step == 3)
    below = descendants(process.pid)
    process.kill()
    process.wait(300)
    assert len(below) == 3
    wait_for(lambda: sum(map(is_running, below)) == 1)
    [ranks] = filter(is_running, below)  # Slurm ends them with the job
    os.kill(ranks, signal.SIGKILL)
