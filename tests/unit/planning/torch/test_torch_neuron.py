"""Planning of engine torch on Trainium: degrees, stages, and the variables of its jobs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.engine_rules import rules_of
from hyperpod_ft.runs.run import Run
from tests.conftest import MakeRun


@pytest.fixture
def trainium(make_run: MakeRun) -> Callable[..., Run]:
    def make(**values: object) -> Run:
        return make_run(cluster__instance_type="trn2.48xlarge", **({"parallelism": {}} | values))

    return make


def test_the_cores_of_a_chip_share_each_layer(trainium: MakeRun, make_run: MakeRun) -> None:
    degrees = trainium().plan.degrees
    assert (degrees.tensor_parallel, degrees.data_parallel) == (4, 16)
    assert make_run(cluster__instance_type="trn2.3xlarge", parallelism={}).plan.degrees.data_parallel == 1
    assert make_run(cluster__instance_type="p5.48xlarge", parallelism={}).plan.degrees.tensor_parallel == 1


def test_pipelines_are_refused(make_run: MakeRun) -> None:
    with pytest.raises(UserError, match=r"parallelism\.pipeline_parallel: .* trn2"):
        make_run(cluster__instance_type="trn2.48xlarge", parallelism={"pipeline_parallel": 2})


def test_graphs_are_compiled_before_training_and_shared_by_their_shapes(trainium: MakeRun, make_run: MakeRun) -> None:
    run = trainium()
    assert "precompile" in run.plan["train"].needs
    assert trainium(training__learning_rate=1e-3).paths.neuron_cache == run.paths.neuron_cache
    for changed in (
        {"dataset__max_length": 1024},
        {"dataset__validation_share": 0},
        {"training__micro_batch_size": 2},
        {"lora__r": 4},
        {"parallelism": {"sharding": "zero3"}},
        {"parallelism": {"sequence_parallel": False}},
    ):
        assert trainium(**changed).paths.neuron_cache != run.paths.neuron_cache, changed
    flags = {"NEURON_CC_FLAGS": "-O1"}
    assert trainium(cluster__environment=flags).paths.neuron_cache != run.paths.neuron_cache
    assert run.plan["generate"].resources.cpus, "on CPUs"
    assert "precompile" not in make_run(cluster__instance_type="p5.48xlarge", parallelism={}).plan


def test_variables_of_the_jobs(trainium: MakeRun) -> None:
    one = rules_of("torch").variables(trainium().config, Path("/fsx/cache/0123"))
    assert one["TORCH_NEURONX_NEFF_CACHE_DIR"] == "/fsx/cache/0123"
    assert one["NEURON_LOGICAL_NC_CONFIG"] == one["NEURON_RT_VIRTUAL_CORE_SIZE"] == "2"
    assert one["TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR"].startswith("/tmp/"), "locks"
    assert not any(name.startswith("FI_") for name in one)
    other = rules_of("torch").variables(trainium(cluster__nodes=2).config, Path("/fsx/cache/4567"))
    assert other["FI_PROVIDER"] == "efa"
    assert other["TORCH_NEURONX_DEBUG_DIR"] != one["TORCH_NEURONX_DEBUG_DIR"]
    given = trainium(cluster__environment={"MALLOC_ARENA_MAX": "2"}).config
    assert "MALLOC_ARENA_MAX" not in rules_of("torch").variables(given, Path("/fsx/cache/0123"))
