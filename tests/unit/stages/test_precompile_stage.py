"""Stage precompile through its rendered script: real bash, torchrun and stage programs.

`neuron_parallel_compile` and the engine are stand-ins, see tests/neuron_stand_ins.py.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from hyperpod_ft.job import neuron_cache
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages.train import _counted_graphs
from tests import neuron_stand_ins
from tests.conftest import MakeRun


@pytest.fixture
def run(make_run: MakeRun, tmp_path: Path) -> Run:
    """Two ranks of engine neuron, ready for precompile, in an environment of stand-ins."""
    run = make_run(
        engine="neuron",
        cluster__instance_type="trn1.32xlarge",
        parallelism={"ranks_per_node": 2, "tensor_parallel": 2},
        env__python=str(neuron_stand_ins.environment(tmp_path / "venv")),
    )
    neuron_stand_ins.ready_for_precompile(run)
    return run


def precompile(run: Run, **environment: str) -> "subprocess.CompletedProcess[str]":
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.run(
        ["bash", run.paths.script("precompile")],
        env={**inherited, **environment, "HYPERPOD_FT_JOB_ID": "7"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_graph_that_does_not_compile_leaves_no_record_and_is_compiled_next_time(run: Run) -> None:
    failed = precompile(run, STAND_IN_FAILS="optimizer")
    assert failed.returncode == 2
    assert "error: precompile: 1 of 2 graphs were not compiled" in failed.stderr
    assert "Failed compilation with ['neuronx-cc']: stand-in" in failed.stderr
    assert run.journal.record("precompile") is None

    done = precompile(run)
    assert done.returncode == 0, done.stdout + done.stderr
    record = run.journal.record("precompile")
    assert record is not None
    assert run.journal.is_done("precompile")
    assert record.facts == {
        "graphs": 2,
        "graphs_compiled": 1,
        "cache_entries_removed": ["neuronxcc-0.0.0.0+standin/MODULE_optimizer+00000000"],
        "trial_steps": 10,
    }
    assert [Path(output.path).name for output in record.outputs] == ["model.neff"] * 2
    for rank in range(2):
        seen = json.loads((run.paths.directory / f"rank{rank}.json").read_text())
        assert seen["NEURON_EXTRACT_GRAPHS_ONLY"] == "1"
        assert seen["WORLD_SIZE"] == "2"
        assert f"--cache_dir={run.paths.neuron_cache}" in seen["NEURON_CC_FLAGS"].split()
    assert (
        not run.paths.trial_facts.exists()
        and json.loads(run.paths.layout_path.read_text())["sharding"]["mode"] == "replicated"
    )
    assert not list(run.paths.checkpoints.glob("*"))
    assert not run.paths.metrics_path.exists()
    assert run.journal.record("train") is None

    (run.paths.directory / "rank0.json").unlink()
    again = precompile(run)
    assert again.returncode == 0
    assert "already done" in again.stdout
    assert not (run.paths.directory / "rank0.json").exists(), "nothing was started"


def test_a_trial_that_is_refused_says_why_once_and_ends_the_stage(run: Run) -> None:
    refused = precompile(run, STAND_IN_TRIAL="refuses")
    assert refused.returncode != 0
    assert refused.stderr.count("error: train: this cannot be traced; correct it") == 1
    assert f"error: precompile: the command ended with exit status {refused.returncode}" in refused.stderr
    assert run.journal.record("precompile") is None
    assert neuron_cache.finished(run.paths.neuron_cache) == set()


def test_a_trial_whose_failure_the_compiler_driver_ignores_leaves_no_record(run: Run) -> None:
    failed = precompile(run, STAND_IN_TRIAL="refuses", STAND_IN_IGNORES_FAILURE="1")
    assert failed.returncode == 2, "the status of the rank that failed first"
    assert "error: precompile: " in failed.stderr and "Traceback" not in failed.stderr
    assert run.journal.record("precompile") is None


def test_graphs_that_training_still_compiles_are_counted(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    def add(name: str) -> Path:
        entry = run.paths.neuron_cache / "neuronxcc-1" / f"MODULE_{name}"
        entry.mkdir(parents=True)
        (entry / "model.neff").write_bytes(bytes(1024))
        (entry / "model.done").touch()
        return entry

    add("before")
    with _counted_graphs(run) as facts:
        add("during")
    assert facts == {"graphs_compiled": 1}
    assert "train: 1 graphs were compiled during training" in capsys.readouterr().out


def test_nothing_is_compiled_ahead_on_cpus_and_gpus(make_run: MakeRun) -> None:
    for instance_type in ("local", "p5.48xlarge"):
        with _counted_graphs(make_run(cluster__instance_type=instance_type)) as facts:
            pass
        assert facts == {}
