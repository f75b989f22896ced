"""Stage precompile of engine torch, through rendered scripts: what the trial compiles, training need not compile.

The device and its compiler are stand-ins, see tests/neuron_stand_ins.py; the engine, its step and torchrun are real.
"""

import os
import subprocess
from pathlib import Path

import pytest

from hyperpod_ft import publish
from hyperpod_ft.launch.render import Installation, render
from hyperpod_ft.runs.run import Run
from tests import neuron_stand_ins
from tests.training.conftest import ENVIRONMENT, MakeRun, metrics, write_rows

pytestmark = pytest.mark.training


def job(run: Run, stage: str) -> "subprocess.CompletedProcess[str]":
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.run(
        ["bash", run.paths.script(stage)],
        env={**inherited, **ENVIRONMENT, "HYPERPOD_FT_JOB_ID": "7"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_a_trial_compiles_all_that_training_needs(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(
        "trial",
        {
            "cluster.instance_type": "trn2.48xlarge",
            "env.python": str(neuron_stand_ins.torch_environment(tmp_path / "venv")),
            "parallelism": {"ranks_per_node": 1, "tensor_parallel": 1},
            "training.max_steps": 2,
            "training.compile": True,  # the stand-in for the device is a CPU
        },
    )
    write_rows(run.paths.dataset_path / "validation", rows=5, max_length=32, seed=9)
    run.paths.record_path("precompile").unlink()
    run.paths.logs.mkdir(parents=True)
    scripts = render(run, Installation(run.paths.python, neuron_stand_ins.REPOSITORY))
    for stage in ("precompile", "train"):
        publish.write_text(run.paths.script(stage), scripts[stage])

    done = job(run, "precompile")
    assert done.returncode == 0, done.stdout + done.stderr
    record = run.journal.record("precompile")
    assert record is not None and record.facts["trial_steps"] == 1
    assert record.facts["graphs"] == record.facts["graphs_compiled"] > 0
    assert {Path(output.path).suffix for output in record.outputs} == {".neff"}
    assert not list(run.paths.checkpoints.glob("*")) and not run.paths.metrics_path.exists(), (
        "nothing of the trial is kept"
    )

    trained = job(run, "train")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    record = run.journal.record("train")
    assert record is not None and record.facts["graphs_compiled"] == 0
    assert len(metrics(run)) == 2
