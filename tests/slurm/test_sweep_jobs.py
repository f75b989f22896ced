"""A sweep on a real Slurm: killed at every job, and then each job exists once, within the limit, shared stages once."""

import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.localcluster import LocalCluster
from hyperpod_ft.sweep.planning import PlannedSweep, plan_sweep
from hyperpod_ft.sweep.results import sweep_result
from hyperpod_ft.sweep.submission import cancel_sweep, resume_sweep, submit_sweep
from hyperpod_ft.sweep.sweep import Sweep
from tests.conftest import run_file_values
from tests.quick_stages import interpreter, most_at_a_time
from tests.waiting import wait_for

pytestmark = pytest.mark.slurm

# Kills the submission that calls it, before or after the job is created; the job is held.
KILLING = """#!/bin/bash
count=$(($(cat {directory}/count) + 1))
echo $count >{directory}/count
if [[ ! -e {directory}/spare ]]; then
  if ((count % 2)); then kill -9 $PPID; sleep 0.1; REAL --hold "$@"; else REAL --hold "$@" >/dev/null; kill -9 $PPID; fi
else
  exec REAL --hold "$@"
fi
"""


@pytest.fixture
def killing(cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with an sbatch that kills, until it has a file `spare`. Slurm is the local cluster's."""
    for name, value in cluster.environment().items():
        monkeypatch.setenv(name, value)
    directory = tmp_path / "bin"
    directory.mkdir()
    (directory / "count").write_text("0")
    real = subprocess.run(["which", "sbatch"], capture_output=True, text=True, check=True).stdout.strip()
    wrapper = directory / "sbatch"
    wrapper.write_text(KILLING.format(directory=directory).replace("REAL", real))
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    wait_for_the_queue()  # a job of an earlier test may still be completing
    yield directory
    subprocess.run(["scancel", "--user", str(os.getuid())], check=True, timeout=300)
    wait_for_the_queue()


def queue(columns: str) -> list[str]:
    done = subprocess.run(["squeue", "-h", "-o", columns], capture_output=True, text=True, check=True, timeout=300)
    return done.stdout.splitlines()


def wait_for_the_queue() -> None:
    wait_for(lambda: not queue("%i"), 300, lambda: queue("%i %j %T %r"), every=0.1)


def plan(tmp_path: Path) -> PlannedSweep:
    values = run_file_values(tmp_path / "root", env__python=str(interpreter(tmp_path)))
    values["model"], values["dataset"] = {"source": "example:tiny-llama"}, {"source": "example:qa", "format": "dolly"}
    values["parallelism"] = {"ranks_per_node": 1, "tensor_parallel": 1}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    sweep = {
        "name": "rates",
        "run": "run.yaml",
        "runs_at_a_time": 1,
        "grid": {"training.learning_rate": [0.3, 0.1, 0.2]},
    }
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    return plan_sweep(tmp_path / "sweep.yaml", "slurm")


def submit_in_a_process(planned: PlannedSweep) -> bool:
    """Whether it lived to its end."""
    if pid := os.fork():
        return os.waitpid(pid, 0)[1] == 0
    try:
        list(submit_sweep(planned, Launchers()))
        os._exit(0)
    finally:
        os._exit(1)


def test_a_sweep_that_is_killed_at_every_job_loses_and_doubles_nothing(killing: Path, tmp_path: Path) -> None:
    planned = plan(tmp_path)
    root = planned.sweep.root
    for _ in range(8):
        assert not submit_in_a_process(planned), "sbatch kills it"
    (killing / "spare").touch()
    assert submit_in_a_process(planned)
    assert submit_in_a_process(planned), "nothing is left to submit"
    jobs = Counter(queue("%j|%k"))
    assert max(jobs.values()) == 1, jobs
    # env, download, certify and dataset once; train, consolidate, merge and generate of three runs
    assert len(jobs) == 4 + 3 * 4
    assert {job.job_id for run in planned.runs for job in run.journal.jobs()} == set(queue("%i"))

    # a shared stage fails: what waits for it is cancelled, and resume submits it again, once
    (root / "fail-dataset").touch()
    subprocess.run(["scontrol", "release", ",".join(queue("%i"))], check=True, timeout=300)
    wait_for_the_queue()
    sweep = Sweep.open(planned.sweep.directory)
    assert [point.state for point in sweep_result(sweep, Launchers()).points] == ["failed", "cancelled", "cancelled"]
    (root / "fail-dataset").unlink()
    resumed = {done.number: [job.stage for job in done.jobs] for done in resume_sweep(sweep, Launchers())}
    after = ["train", "consolidate", "merge", "generate"]
    assert resumed == {1: ["dataset", *after], 2: after, 3: after}
    subprocess.run(["scontrol", "release", ",".join(queue("%i"))], check=True, timeout=300)
    wait_for_the_queue()

    result = sweep_result(sweep, Launchers())
    assert [point.state for point in result.points] == ["done"] * 3
    assert [point.validation_loss for point in result.points] == [0.3, 0.1, 0.2]
    assert (result.best, result.note) == (2, "")
    assert most_at_a_time(root) == 1
    assert all(done.done for done in submit_sweep(planned, Launchers()))


def test_cancel_starts_no_run_that_waited(killing: Path, tmp_path: Path) -> None:
    planned = plan(tmp_path)
    (killing / "spare").touch()
    list(submit_sweep(planned, Launchers()))
    jobs = {job.job_id for run in planned.runs for job in run.journal.jobs()}
    cancelled = {job.job_id for _, of_run in cancel_sweep(planned.sweep, Launchers()) for job in of_run}
    assert cancelled == jobs
    wait_for_the_queue()
    assert not (planned.sweep.root / "trained").exists()
    assert {point.state for point in sweep_result(planned.sweep, Launchers()).points} == {"cancelled"}
