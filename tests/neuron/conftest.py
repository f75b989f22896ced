"""Small real runs of engine neuron, where its packages are: a Trainium node, or a CPU with stand-ins for the runtime.

`HYPERPOD_FT_NEURON_PYTHON` names an interpreter that imports them, when it is not the one that runs the tests;
scripts/test-neuron.sh makes such an environment on a CPU.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, PretrainedConfig

from hyperpod_ft.runs.run import Run
from tests.conftest import MakeRun
from tests.forking import ForkServer
from tests.training.conftest import ENVIRONMENT, Jobs, Launched, job_server, jobs, tiny_llama
from tests.training.conftest import make_run as make_training_run
from tests.unit import tiny_tokenizer

__all__ = ["jobs", "make_training_run"]

HERE = Path(__file__).parent
NAMED = "HYPERPOD_FT_NEURON_PYTHON"
PYTHON = os.environ.get(NAMED, sys.executable)
# the last one: importing torch._inductor would start a process for each CPU
ON_CPU = {"PJRT_DEVICE": "CPU", "NXD_CPU_MODE": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
PATIENCE_SECONDS = 600  # sixteen ranks on two processors


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, unless an interpreter was named, where the packages are not: in one line, as no skip of a fixture is."""
    if not (NAMED in os.environ or find_spec("neuronx_distributed") or item.config.option.setupplan):
        pytest.skip("engine neuron did not run: no neuronx-distributed here; scripts/test-neuron.sh runs these tests")


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """In place of the one of tests/training, whose fixture `jobs` asks for it.

    It starts as a rank, so that stand-ins are there, which ask for the rank's environment whenever they are called.
    """
    environment = os.environ | ENVIRONMENT | ON_CPU | {"RANK": "0", "WORLD_SIZE": "1"}
    with closing(job_server(["hyperpod_ft.engines.neuron.loop"], environment, HERE, python=PYTHON)) as server:
        yield server


class NeuronJobs(Jobs):
    """Jobs on the run's chip, with as much time as they need."""

    def start(self, ranks: int, module: list[str]) -> Launched:
        instance = Run.open(Path(module[1])).config.cluster.instance_type
        self.environment = ON_CPU | {"NEURON_PLATFORM_TARGET_OVERRIDE": instance.partition(".")[0]}
        return super().start(ranks, module)

    def train(self, run: Run, expect: int = 0) -> str:
        job = self.start_train(run)
        assert job.wait(PATIENCE_SECONDS) == expect, job.text()
        return job.text()


@pytest.fixture
def neuron_jobs(jobs: Jobs) -> NeuronJobs:
    return NeuronJobs(jobs.directory, jobs.server, jobs.started, always_torchrun=True)


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
        tiny_tokenizer.make().save_pretrained(run.paths.base_model)
        return run

    return make
