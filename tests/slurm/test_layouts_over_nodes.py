"""Layouts over two nodes of a real Slurm train as one rank does: stages and rows across the network."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.submit import prepare
from hyperpod_ft.localcluster import LocalCluster
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import consolidate
from tests.training.conftest import MakeRun, curve, make_run, tiny_llama, train_here  # noqa: F401 - a fixture
from tests.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.training, pytest.mark.timeout(900)]

ALONE: dict[str, Any] = {"parallelism": {"ranks_per_node": 1}, "training.micro_batch_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp": {"parallelism": {"ranks_per_node": 1, "pipeline_parallel": 2}, "training.micro_batch_size": 2},
    "cp": {"parallelism": {"ranks_per_node": 1, "context_parallel": 2}, "training.micro_batch_size": 2},
}


def test_two_nodes_train_as_one_rank(
    cluster: LocalCluster,
    make_run: MakeRun,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both layouts need the other node in each step. With tensor parallelism it is the quickstart of README that has
    two nodes, with parameters sharded over them test_training_containers.py.
    """
    for name, value in cluster.environment().items():
        monkeypatch.setenv(name, value)
    settings = {
        "env": {"python": sys.executable},
        "training.method": "full",
        "training.max_steps": 4,
        "training.gradient_accumulation_steps": 4,
        "training.max_grad_norm": 0.2,
        "training.learning_rate": 1e-4,
    }
    model = tiny_llama(num_hidden_layers=4, tie_word_embeddings=True)
    runs = {}
    for name, layout in LAYOUTS.items():
        runs[name] = make_run(name, settings | layout | {"cluster.nodes": 2, "cluster.time_limit": "15"}, model=model)
        prepare(runs[name], Launchers())
    jobs = {name: _slurm("sbatch", "--parsable", str(run.paths.script("train"))).strip() for name, run in runs.items()}
    alone = make_run("alone", settings | ALONE, model=model)
    train_here(alone)
    expected, initial = exported(alone), tensors_of(alone.paths.base_model)
    wait_for(
        lambda: not _slurm("squeue", "--noheader", f"--jobs={','.join(jobs.values())}"),
        480,
        lambda: {name: said(run) for name, run in runs.items()},
        every=0.5,
    )
    for name, run in runs.items():
        assert run.journal.record("train") is not None, said(run)
        for found, alike in zip(curve(run), curve(alone), strict=True):
            assert found == pytest.approx(alike, rel=1e-5), name
        weights = exported(run)
        assert weights.keys() == expected.keys()
        for key, value in expected.items():
            # AdamW moves the few elements whose gradient is mostly rounding as far as all others
            assert (weights[key] - value).norm() <= 0.01 * (value - initial[key]).norm(), (name, key)


def exported(run: Run) -> dict[str, torch.Tensor]:
    consolidate.work(run)
    return tensors_of(run.paths.tuned_model)


def tensors_of(model: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for file in model.glob("*.safetensors") for key, tensor in load_file(file).items()}


def said(run: Run) -> str:
    return "".join(path.read_text() for path in run.paths.logs.glob("*.out"))


def _slurm(*arguments: str) -> str:
    return subprocess.run(
        arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=True
    ).stdout
