"""Small real runs of engine neuron, where its packages are: a Trainium node, or a CPU with stand-ins for the runtime.

`HYPERPOD_FT_NEURON_PYTHON` names an interpreter that imports them, when it is not the one that runs the tests;
scripts/test-neuron.sh makes such an environment on a CPU.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, PretrainedConfig

from hyperpod_ft.runs.run import Run
from tests.training.conftest import Jobs, Launched, jobs, tiny_llama
from tests.training.conftest import make_run as make_training_run
from tests.unit import tiny_tokenizer

__all__ = ["jobs", "make_training_run"]

HERE = Path(__file__).parent
# the last one: importing torch._inductor would start a process for each CPU
ON_CPU = {"PJRT_DEVICE": "CPU", "NXD_CPU_MODE": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
PATIENCE_SECONDS = 1800  # sixteen ranks on two processors
MakeRun = Callable[..., Run]


@cache
def why_missing(python: str) -> str:
    """Why the interpreter cannot run engine neuron; empty when it can."""
    # as a rank: where stand-ins are needed they are there for ranks alone
    probe = subprocess.run(
        [python, "-c", "import neuronx_distributed, optimum.neuron, torch_xla"],
        env=os.environ | ON_CPU | {"RANK": "0", "WORLD_SIZE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return probe.stderr.strip().rpartition("\n")[2] if probe.returncode else ""


@pytest.fixture(scope="session")
def neuron_python() -> str:
    python = os.environ.get("HYPERPOD_FT_NEURON_PYTHON", sys.executable)
    if reason := why_missing(python):
        pytest.skip(f"engine neuron did not run: {python}: {reason}; HYPERPOD_FT_NEURON_PYTHON names an interpreter")
    return python


class NeuronJobs(Jobs):
    """Jobs of the interpreter that has Neuron's packages, on the run's chip, with as much time as they need."""

    def start(self, ranks: int, module: list[str]) -> Launched:
        instance = Run.open(Path(module[1])).config.cluster.instance_type
        self.environment = ON_CPU | {"NEURON_PLATFORM_TARGET_OVERRIDE": instance.partition(".")[0]}
        return super().start(ranks, module)

    def train(self, run: Run, expect: int = 0) -> str:
        job = self.start_train(run)
        assert job.wait(PATIENCE_SECONDS) == expect, job.text()
        return job.text()


@pytest.fixture
def neuron_jobs(jobs: Jobs, neuron_python: str) -> NeuronJobs:
    return NeuronJobs(
        jobs.directory,
        jobs.started,
        neuron_python,
        modules=(HERE, HERE.parents[1]),
        always_torchrun=True,
        torchrun="torch.distributed.run",
    )


def llama(**changes: Any) -> LlamaConfig:
    return tiny_llama(vocab_size=400, num_hidden_layers=2, **changes)


@pytest.fixture
def make_run(make_training_run: Callable[..., Run]) -> MakeRun:
    """`make_run("name", tp=2, dp=2, settings={"training.max_steps": 4})`: a run whose stages before train are done."""

    def make(
        name: str = "run",
        *,
        tp: int = 2,
        dp: int = 1,
        pp: int = 1,
        settings: dict[str, Any] | None = None,
        model: PretrainedConfig | None = None,
    ) -> Run:
        values = {
            "engine": "neuron",
            "cluster.instance_type": "trn1.32xlarge",
            "parallelism": {"ranks_per_node": tp * dp * pp, "tensor_parallel": tp, "pipeline_parallel": pp},
            "training.micro_batch_size": 4 // dp,
        }
        run = make_training_run(name, values | (settings or {}), model or llama())
        tiny_tokenizer.make().save_pretrained(run.base_model)
        return run

    return make
