"""What to do when Slurm refuses or forgets. Its programs are stand-ins here that print what its own print."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.render import slurm_job_name
from hyperpod_ft.launch.slurm import client
from hyperpod_ft.launch.slurm.client import Slurm
from hyperpod_ft.launch.slurm.launcher import SlurmLauncher
from hyperpod_ft.launch.slurm.programs import SlurmUnreachableError
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.run import Run


def put_on_path(programs: dict[str, str], directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.mkdir()
    for name, script in programs.items():
        program = directory / name
        program.write_text(f"#!/bin/bash\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


def test_what_only_the_accounting_calls_running_has_ended(
    make_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that lost its state has never told it of the end. Such a job must not hold up a run for ever."""
    run = make_run()
    run.freeze()
    rows = "\n".join(
        f"{job}|{state}|0:10|node1|{slurm_job_name(run.config, 'env')}|{run.paths.directory}"
        for job, state in _ACCOUNTED
    )
    programs = {"squeue": "echo 'Invalid job id specified' >&2; exit 1", "sacct": f"cat <<'E'\n{rows}\nE"}
    put_on_path({**programs, "scontrol": "exit 1"}, tmp_path / "bin", monkeypatch)
    jobs = [Job("env", job, "slurm", "2026-01-01T00:00:00Z") for job, _ in _ACCOUNTED]
    found = SlurmLauncher().states(run, jobs)
    assert {job.job_id: state.state for job, state in found.items()} == {"7": "FAILED"}


_ACCOUNTED = (("7", "FAILED"), ("8", "RUNNING"), ("9", "PENDING"))


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("Batch job submission failed: Invalid qos specification", "correct the run file's cluster section"),
        ("Batch job submission failed: Unable to contact slurm controller (connect failure)", "slurmctld is running"),
        ("Could not establish a configuration source", "--launcher process"),
        ("Batch job submission failed: Requested topology configuration is not available", "docs/cluster-day-two.md"),
        (
            "Batch job submission failed: Invalid account or account/partition combination specified",
            "ask for a Slurm account",
        ),
    ],
)
def test_a_failed_sbatch(
    make_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, remedy: str
) -> None:
    programs = {"sbatch": f"echo 'sbatch: error: {said}' >&2; exit 1", "squeue": "exit 0"}
    put_on_path(programs, tmp_path / "bin", monkeypatch)
    run = make_run()
    run.freeze()
    with pytest.raises(UserError) as error:
        SlurmLauncher().submit(run, run.plan.stages[:1], {})
    assert f": {said}" in error.value.problem
    assert remedy in error.value.remedy


def test_idle_nodes_that_a_job_cannot_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "idle 1\nreserved 4\nidle~ 8\nplanned 16\nidle* 32\nmixed 64\nidle 128\n"
    put_on_path(
        {"sinfo": f"test $3 != '--partition=slow' || exec sleep 60\nprintf '{rows}'"}, tmp_path / "bin", monkeypatch
    )
    assert (Slurm().idle_nodes("dev", reserved=False), Slurm().idle_nodes("dev", reserved=True)) == (129, 4)
    monkeypatch.setattr(client, "_SHORT_SECONDS", 0.1)
    with pytest.raises(SlurmUnreachableError):
        Slurm().idle_nodes("slow", reserved=False)
