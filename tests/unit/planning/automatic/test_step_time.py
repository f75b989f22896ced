"""The estimate of a step's time changes as its parts do."""

from dataclasses import replace
from typing import Any

import pytest

from hyperpod_ft.config import instances
from hyperpod_ft.planning.automatic import step_time as module
from hyperpod_ft.planning.automatic.step_time import StepTime, step_time
from hyperpod_ft.planning.layout import Degrees, Sharding
from hyperpod_ft.planning.model_shape import model_shape
from hyperpod_ft.planning.torch.memory import memory_of
from scripts.memory_table import LLAMA_3_8B
from tests.unit.planning.automatic.test_choice import config

REPLICATED = Sharding("replicated", 1)
P5 = "p5.48xlarge"


def estimate(
    degrees: tuple[int, int, int] = (1, 1, 1),
    sharding: Sharding = REPLICATED,
    nodes: int = 1,
    instance: str = P5,
    length: int = 8192,
    **training: Any,
) -> StepTime:
    """`degrees`: tensor, pipeline, context."""
    shape = model_shape(LLAMA_3_8B)
    assert shape is not None
    tensor, pipeline, context = degrees
    given = Degrees(nodes, 8, tensor, pipeline, context)
    run_file = config(instance, nodes, length, training)
    return step_time(run_file, given, shape, sharding, memory_of(run_file, given, shape).stages)


def test_computation_is_that_of_the_model() -> None:
    """6 operations a parameter and token, and those of attention, at the stated efficiency (engines/throughput.py)."""
    parameters = 8.03e9 - 128256 * 4096
    operations = 8192 * (6 * parameters + 12 * 32 * 4096 * 8192)
    seconds = operations / (989.4e12 * module.COMPUTE_EFFICIENCY)
    assert estimate(method="full").compute == pytest.approx(seconds, rel=0.01)


def test_a_pipeline_waits_less_with_more_micro_batches() -> None:
    def waiting(accumulated: int) -> float:
        found = estimate((1, 4, 1), gradient_accumulation_steps=accumulated)
        return found.pipeline / found.compute

    assert waiting(1) > 3 > waiting(2) > waiting(8) > 3 / 8


def test_faster_links_and_processors_never_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = [((2, 1, 2), Sharding("zero3", 4)), ((1, 1, 8), REPLICATED), ((8, 1, 1), REPLICATED)]
    before = [estimate(degrees, sharding, nodes=4).total for degrees, sharding in layouts]
    slow = instances.CATALOGUE[P5]
    for change in ({"network_gbit": 6400}, {"device_link_gbs": 900.0}, {"device_tflops": 2000.0}):
        monkeypatch.setitem(instances.CATALOGUE, P5, replace(slow, **change))
        after = [estimate(degrees, sharding, nodes=4).total for degrees, sharding in layouts]
        assert all(new <= old for new, old in zip(after, before, strict=True)) and after != before
