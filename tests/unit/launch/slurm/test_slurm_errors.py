"""What to do when sbatch fails. It is a stand-in here that prints what Slurm's own prints."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.slurm.launcher import SlurmLauncher
from hyperpod_ft.runs.run import Run


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("Batch job submission failed: Invalid qos specification", "correct the run file's cluster section"),
        ("Batch job submission failed: Unable to contact slurm controller (connect failure)", "slurmctld is running"),
        ("Could not establish a configuration source", "--launcher process"),
        ("Batch job submission failed: Requested topology configuration is not available", "docs/lifecycle.md"),
        (
            "Batch job submission failed: Invalid account or account/partition combination specified",
            "ask for a Slurm account",
        ),
    ],
)
def test_a_failed_sbatch(
    make_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, remedy: str
) -> None:
    for name, script in (("sbatch", f"echo 'sbatch: error: {said}' >&2; exit 1"), ("squeue", "exit 0")):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/bash\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    run = make_run()
    run.freeze()
    with pytest.raises(UserError) as error:
        SlurmLauncher().submit(run, run.plan.stages[:1], lambda job: None)
    assert f": {said}" in error.value.problem
    assert remedy in error.value.remedy
