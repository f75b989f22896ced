"""Which sharding a run gets: as its run file says, or the fastest that fits."""

from typing import Any

import pytest

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.layout import Sharding
from hyperpod_ft.planning.model_fit import check_memory
from hyperpod_ft.planning.model_shape import model_shape
from hyperpod_ft.planning.parallelism import degrees_of
from hyperpod_ft.planning.plan import plan
from hyperpod_ft.planning.torch import sharding
from hyperpod_ft.planning.torch.step_memory import checkpoint_memory
from scripts.memory_table import LLAMA_3_8B, LLAMA_3_70B
from tests.conftest import MakeRun


def on(make_run: MakeRun, instance: str, nodes: int = 1, **values: Any) -> RunConfig:
    cluster = {"cluster__instance_type": instance, "cluster__nodes": nodes}
    return make_run(**{"parallelism": {}, "dataset__max_length": 2048} | cluster | values).config


def chosen(config: RunConfig, model_config: dict[str, Any]) -> str:
    return sharding.explain_sharding(config, degrees_of(config), model_shape(model_config))


@pytest.mark.parametrize(
    ("nodes", "values", "model_config", "expected"),
    [
        (1, {}, LLAMA_3_8B, "replicated"),
        (1, {}, LLAMA_3_70B, "zero3 over 8 ranks (zero2 over 8 ranks needs "),
        (4, {"dataset__max_length": 2304}, LLAMA_3_70B, "zero3 over 32 ranks (zero3 over 8 ranks needs "),
        (
            *(4, {"training__activation_checkpointing": "full"}, LLAMA_3_70B),
            "zero3 over 8 ranks (zero2 over 32 ranks needs ",
        ),
        (1, {"training__method": "full"}, LLAMA_3_8B, "zero1 over 8 ranks"),
        (
            1,
            {
                "training__method": "full",
                "training__gradient_accumulation_steps": 8,
                "training__micro_batch_size": 2,
            },
            LLAMA_3_8B,
            "zero2 over 8 ranks (zero1 over 8 ranks needs ",
        ),
        # with LoRA the gathered weights of zero2 are what does not fit
        (
            16,
            {"training__method": "full", "training__activation_checkpointing": "full"},
            LLAMA_3_70B,
            "zero3 over 128 ranks",
        ),
        (1, {"parallelism": {"sharding": "zero2"}}, LLAMA_3_8B, "zero2 over 8 ranks"),
        (2, {"parallelism": {"sharding": "zero1", "shard_ranks": 4}}, LLAMA_3_8B, "zero1 over 4 ranks"),
        (1, {"parallelism": {"offload": "optimizer"}}, LLAMA_3_8B, "replicated, optimizer in host memory"),
        (1, {"parallelism": {"offload": "parameters"}}, LLAMA_3_8B, "zero3 over 8 ranks, parameters in host memory"),
        (1, {"parallelism": {"tensor_parallel": 8, "sharding": "zero3"}}, LLAMA_3_8B, "replicated"),
        # only `auto` stays within nodes
        (2, {"parallelism": {"tensor_parallel": 2, "sharding": "zero3"}}, LLAMA_3_8B, "zero3 over 8 ranks"),
    ],
)
def test_the_fastest_that_fits(
    make_run: MakeRun, nodes: int, values: dict[str, Any], model_config: dict[str, Any], expected: str
) -> None:
    assert chosen(on(make_run, "p5.48xlarge", nodes, **values), model_config).startswith(expected)


def test_the_size_of_a_model_may_be_unknown(make_run: MakeRun) -> None:
    config = on(make_run, "p5.48xlarge", 2)
    assert sharding.choose_sharding(config, degrees_of(config), None) == Sharding("zero3", 16), "needs the least memory"
    local = make_run(parallelism={"ranks_per_node": 2}).config
    assert sharding.choose_sharding(local, degrees_of(local), None) == Sharding("replicated", 1), (
        "CPUs have no such limit"
    )


def test_host_memory_is_a_remedy_that_is_not_chosen_unasked(make_run: MakeRun) -> None:
    config = on(make_run, "p4d.24xlarge", training__method="full", training__activation_checkpointing="full")
    shape = model_shape(LLAMA_3_70B)
    assert shape is not None
    with pytest.raises(UserError) as raised:
        check_memory(config, degrees_of(config), shape)
    assert "parallelism.offload: parameters" in raised.value.remedy, raised.value


@pytest.mark.parametrize(("nodes", "node_bytes"), [(1, 2 * 96e9), (4, 4 * 96e9 / 4)])
def test_memory_checkpoints_take_two_states_of_the_node_and_of_another(
    make_run: MakeRun, nodes: int, node_bytes: float
) -> None:
    every = {"training__method": "full", "training__memory_checkpoint_every_steps": 10}
    config, shape = on(make_run, "p5.48xlarge", nodes, **every), model_shape(LLAMA_3_8B)
    assert shape is not None
    degrees = degrees_of(config)
    taken = checkpoint_memory(config, degrees, shape, sharding.choose_sharding(config, degrees, shape))
    assert taken == pytest.approx(node_bytes, rel=0.01), "12 bytes for each of 8.03 billion parameters"


def test_what_contradicts_itself_is_refused(make_run: MakeRun) -> None:
    for values, words in (
        ({"sharding": "zero1", "offload": "parameters"}, "set sharding to zero3"),
        ({"sharding": "replicated", "shard_ranks": 2}, "no effect with sharding replicated"),
    ):
        with pytest.raises(UserError, match=words):
            make_run(parallelism={"ranks_per_node": 4} | values)
    with pytest.raises(UserError, match="3 does not divide the 4 data-parallel ranks; set it to 1, 2 or 4, or leave"):
        make_run(parallelism={"ranks_per_node": 4, "shard_ranks": 3})


def test_a_run_is_the_same_under_every_sharding(make_run: MakeRun) -> None:
    """Its checkpoints are read under any, and its results agree but for the order of sums."""
    ids = {
        plan(make_run(parallelism={"ranks_per_node": 2} | values).config).run_id
        for values in (
            {},
            {"sharding": "zero3"},
            {"sharding": "zero1", "shard_ranks": 2},
            {"offload": "optimizer"},
            {"expert_parallel": 2},
        )
    }
    assert len(ids) == 1
