"""Which jobs of a real Slurm are a run's, when a submission was cut short or a site has its own ways."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.monitor import active_jobs, status
from hyperpod_ft.launch.slurm import Slurm
from hyperpod_ft.launch.submit import submit
from hyperpod_ft.localcluster import LocalCluster
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import Selection

pytestmark = pytest.mark.slurm
MakeRun = Callable[..., Run]


@pytest.fixture
def slurm(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    for name, value in cluster.environment().items():
        monkeypatch.setenv(name, value)
    yield Slurm()
    subprocess.run(["scancel", "--user", str(os.getuid())], check=True, timeout=30)
    while queue():
        time.sleep(0.1)


def queue() -> list[str]:
    done = subprocess.run(["squeue", "-h", "-o", "%i %j"], capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.splitlines()


def waiting(make_run: MakeRun, **overrides: object) -> Run:
    return make_run(env__python="/bin/false", **overrides)


def sbatch_wrapper(directory: Path, text: str) -> None:
    wrapper = directory / "sbatch"
    real = subprocess.run(["which", "sbatch"], capture_output=True, text=True, check=True).stdout.strip()
    wrapper.write_text(f"#!/bin/bash\n{text.replace('REAL', real)}\n")
    wrapper.chmod(0o755)


def test_jobs_that_a_killed_submission_left_are_found_and_cancelled(
    slurm: Slurm, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = waiting(make_run)
    # held, so that they stay; and slow to answer, so that the kill comes before the answer
    sbatch_wrapper(tmp_path, 'id=$(REAL --hold "$@"); sleep 2; echo "$id"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run.freeze()
    program = (
        "import pathlib, sys; from hyperpod_ft.runs.run import Run; from hyperpod_ft.launch.slurm import Slurm\n"
        "from hyperpod_ft.launch.submit import submit; from hyperpod_ft.runs.selection import Selection\n"
        "submit(Run.open(pathlib.Path(sys.argv[1])), Slurm(), Slurm(), Selection())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, run.directory]) as submission:
        while len(queue()) < 2:
            time.sleep(0.05)
        submission.send_signal(signal.SIGKILL)
    assert len(run.jobs()) == 1, "the second was made, and nobody wrote it down"
    with pytest.raises(UserError, match=r"still at work: (env .*download|download .*env)"):
        submit(run, slurm, slurm, Selection())
    assert len(run.jobs()) == 2
    slurm.cancel(run, active_jobs(run, slurm))
    while queue():
        time.sleep(0.1)
    assert active_jobs(run, slurm) == []


def test_an_interrupted_submission_cancels_what_it_made(
    slurm: Slurm, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = waiting(make_run)
    sbatch_wrapper(
        tmp_path, 'id=$(REAL --hold "$@"); [[ "$*" == *dataset* ]] && { echo oops >&2; exit 1; }; echo "$id"'
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UserError, match="sbatch dataset: oops"):
        submit(run, slurm, slurm, Selection())
    deadline = time.monotonic() + 20
    while queue():
        assert time.monotonic() < deadline, queue()
        time.sleep(0.1)


def test_a_sites_own_ways(slurm: Slurm, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = waiting(make_run)
    sbatch_wrapper(tmp_path, 'echo "Welcome to ExampleCluster, 3 nodes are idle"; exec REAL --hold "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SBATCH_JOB_NAME", "foo")
    monkeypatch.setenv("SBATCH_COMMENT", "site")
    monkeypatch.setenv("SQUEUE_FORMAT", "%A")
    jobs = submit(run, slurm, slurm, Selection())
    assert all(job.job_id.isdigit() for job in jobs)
    subprocess.run(["scontrol", "update", f"jobid={jobs[0].job_id}", "comment=billing-tag"], check=True, timeout=30)
    subprocess.run(["scontrol", "update", f"jobid={jobs[1].job_id}", "jobname=renamed"], check=True, timeout=30)
    assert {entry.state for entry in status(run, slurm).stages} == {"pending"}
    assert len(active_jobs(run, slurm)) == len(jobs)
