"""The estimate of a step's time changes as its parts do."""

from dataclasses import replace
from typing import Any

import pytest

from hyperpod_ft.config import instances
from hyperpod_ft.planning.automatic import step_time as module
from hyperpod_ft.planning.automatic.step_time import StepTime, step_time
from hyperpod_ft.planning.layout import Degrees, Mode, Sharding
from hyperpod_ft.planning.model_shape import model_shape
from hyperpod_ft.planning.torch.step_memory import memory_of
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
    """6 operations a parameter and token, and those of attention, at the stated efficiency (engines/flops.py)."""
    parameters = 8.03e9 - 128256 * 4096
    operations = 8192 * (6 * parameters + 12 * 32 * 4096 * 8192)
    seconds = operations / (989.4e12 * module.COMPUTE_EFFICIENCY)
    assert estimate(method="full").compute == pytest.approx(seconds, rel=0.01)


def test_degrees_divide_computation_and_add_communication() -> None:
    one = estimate()
    for degrees, part in (((2, 1, 1), "tensor"), ((1, 2, 1), "pipeline"), ((1, 1, 2), "context")):
        two = estimate(degrees, gradient_accumulation_steps=1)
        assert two.compute == pytest.approx(one.compute / 2)
        assert getattr(one, part) == 0 < getattr(two, part)


@pytest.mark.parametrize("index", [0, 2])
def test_more_ranks_that_share_a_layer_send_more(index: int) -> None:
    """And over nodes on slower links, which matters most where each pair of ranks exchanges something of its own."""
    part = ("tensor", "pipeline", "context")[index]
    found = []
    for degree in (2, 4, 8, 16):
        degrees = [1, 1, 1]
        degrees[index] = degree
        sent = getattr(estimate((degrees[0], 1, degrees[2]), nodes=2), part)
        found.append(sent * (degree if part == "context" else 1))  # ranks have fewer tokens each
    assert found == sorted(found) and found[3] > (5 if part == "context" else 1) * found[2]


def test_a_pipeline_waits_less_with_more_micro_batches() -> None:
    def waiting(accumulated: int) -> float:
        found = estimate((1, 4, 1), gradient_accumulation_steps=accumulated)
        return found.pipeline / found.compute

    assert waiting(1) > 3 > waiting(2) > waiting(8) > 3 / 8


def test_shardings_in_the_order_of_what_they_send() -> None:
    def sent(mode: Mode, ranks: int = 16, **training: Any) -> float:
        return estimate(sharding=Sharding(mode, ranks), nodes=2, method="full", **training).data

    accumulated = {"gradient_accumulation_steps": 4}
    assert sent("zero1") < sent("replicated", 1)  # weights in bf16 are half of gradients in fp32
    assert sent("zero1", **accumulated) < sent("zero2", **accumulated) < sent("zero3", **accumulated)
    assert sent("zero3", 8, **accumulated) < sent("zero3", 16, **accumulated), "weights stay on their node"


def test_faster_links_and_processors_never_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = [((2, 1, 2), Sharding("zero3", 4)), ((1, 1, 8), REPLICATED), ((8, 1, 1), REPLICATED)]
    before = [estimate(degrees, sharding, nodes=4).total for degrees, sharding in layouts]
    slow = instances.CATALOGUE[P5]
    for change in ({"network_gbit": 6400}, {"device_link_gbs": 900.0}, {"device_tflops": 2000.0}):
        monkeypatch.setitem(instances.CATALOGUE, P5, replace(slow, **change))
        after = [estimate(degrees, sharding, nodes=4).total for degrees, sharding in layouts]
        assert all(new <= old for new, old in zip(after, before, strict=True)) and after != before


def test_longer_rows_and_recomputation_take_longer() -> None:
    totals = [estimate(length=length).total for length in (2048, 4096, 131_072)]
    assert totals == sorted(totals) and totals[2] > 64 * totals[0], "attention grows with the square"
    assert estimate(activation_checkpointing="full").total > estimate(activation_checkpointing="selective").total
    half = estimate(activation_checkpointing="full", activation_checkpointing_every=2).total
    assert estimate().total < half < estimate(activation_checkpointing="full").total
