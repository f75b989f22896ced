"""Ranks that divide a mixture's experts: what is refused, and what each of them keeps."""

from typing import Any

import pytest

from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.layout import Sharding
from hyperpod_ft.planning.model_fit import check_trainable, shape_of
from hyperpod_ft.planning.parallelism import degrees_of
from hyperpod_ft.planning.plan import plan
from hyperpod_ft.planning.torch.sharding import candidates
from hyperpod_ft.planning.torch.step_memory import memory_of
from tests.conftest import MakeRun
from tests.unit.published_mixtures import PUBLISHED

QWEN: dict[str, Any] = PUBLISHED["Qwen/Qwen3-30B-A3B"][0]
GPU = "p5.48xlarge"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"parallelism": {"ranks_per_node": 8, "expert_parallel": 3}}, "3 does not divide the 8 data-parallel ranks; "),
        ({"parallelism": {"degrees": "auto", "expert_parallel": 2}}, "parallelism.degrees auto sets it; remove one"),
        ({"parallelism": {"expert_parallel": 2}, "cluster__instance_type": "trn2.48xlarge"}, ".* on trn2; "),
        ({"parallelism": {"expert_parallel": 2, "tensor_parallel": 8}, "engine": "neuron"}, "only engine torch "),
    ],
)
def test_what_contradicts_divided_experts_is_refused(make_run: MakeRun, overrides: dict[str, Any], words: str) -> None:
    instance = "trn1.32xlarge" if "engine" in overrides else GPU
    with pytest.raises(UserError, match=f"^parallelism.expert_parallel: {words}") as raised:
        make_run(**{"cluster__instance_type": instance} | overrides)
    assert "\n" not in str(raised.value)


def test_shard_ranks_and_divided_experts_nest(make_run: MakeRun) -> None:
    given = {"expert_parallel": 6, "shard_ranks": 4}
    with pytest.raises(UserError, match=r"^parallelism.shard_ranks: 4 neither divides expert_parallel 6 nor is a mul"):
        make_run(cluster__instance_type=GPU, cluster__nodes=3, parallelism=given)
    config = make_run(cluster__instance_type=GPU, cluster__nodes=3, parallelism={"expert_parallel": 6}).config
    assert {sharding.shard_ranks for sharding in candidates(config, degrees_of(config))} == {1, 24}, "8 do not"


@pytest.mark.parametrize(
    ("model", "parallelism", "words"),
    [
        (
            {"model_type": "dbrx"},
            {},
            r"^parallelism.expert_parallel: this 'dbrx' model's config.json names no number of",
        ),
        ({"model_type": "llama"}, {}, r"^parallelism.expert_parallel: this 'llama' model's .*; set it to 1$"),
        (
            QWEN | {"num_experts": 6},
            {},
            r"^parallelism.expert_parallel: 4 does not divide .* 6 experts; set it to 1 or",
        ),
        (
            QWEN,
            {"tensor_parallel": 2},
            r"^parallelism.tensor_parallel: engine torch cannot divide models of type qwen3",
        ),
        (QWEN, {"pipeline_parallel": 2}, r"^parallelism.pipeline_parallel: engine torch cannot cut models of type 'qw"),
    ],
)
def test_models_without_such_experts_are_refused(
    make_run: MakeRun, model: dict[str, Any], parallelism: dict[str, Any], words: str
) -> None:
    accumulated = {"training__gradient_accumulation_steps": 8}
    given = {"expert_parallel": 4} | parallelism
    config = make_run(cluster__instance_type=GPU, parallelism=given, **accumulated).config
    with pytest.raises(UserError, match=words):
        check_trainable(config, degrees_of(config), model)


def test_scales_of_several_experts_are_not_divided(make_run: MakeRun) -> None:
    def degrees(**given: Any) -> Any:
        state = {"training__optimizer_state": "int8", "parallelism": {"ranks_per_node": 8, "expert_parallel": 2}}
        return degrees_of(make_run(cluster__instance_type=GPU, **state | given).config)

    assert degrees().expert_parallel == 2
    experts = {"lora__target_parameters": ["experts.down_proj"]}
    with pytest.raises(UserError, match=r"^training\.optimizer_state: int8 .*; set it to fp32"):
        degrees(**experts)
    assert degrees(**experts, training__optimizer_state="bf16")


def test_a_certificate_is_of_divided_experts_too(make_run: MakeRun) -> None:
    whole, two, four = (
        plan(make_run(cluster__instance_type=GPU, parallelism={"expert_parallel": ranks}).config) for ranks in (1, 2, 4)
    )
    assert whole["certify"].fingerprint != two["certify"].fingerprint == four["certify"].fingerprint
    assert whole["train"].fingerprint == two["train"].fingerprint


def test_ranks_keep_their_part_of_the_experts(make_run: MakeRun) -> None:
    """Of a model that is nearly all experts: weights with replicas, and the gathered layers of zero3."""
    shape = shape_of(QWEN)
    assert shape is not None

    def needed(ranks: int, sharding: Sharding) -> Any:
        full = {"training__method": "full", "training__gradient_accumulation_steps": 1}
        config = make_run(cluster__instance_type=GPU, parallelism={"expert_parallel": ranks}, **full).config
        memory = memory_of(config, degrees_of(config), shape)
        return memory.on_rank(memory.stages[0], sharding)

    replicated, zero1, zero3 = (Sharding("replicated", 1), Sharding("zero1", 8), Sharding("zero3", 8))
    for sharding in (replicated, zero1):
        assert 0.125 < needed(8, sharding).weights / needed(1, sharding).weights < 0.2
    assert needed(8, replicated).optimizer < needed(1, replicated).optimizer / 5
    for sharding in (zero1, zero3):
        assert needed(8, sharding).optimizer == pytest.approx(needed(1, sharding).optimizer)
    assert needed(8, zero3).weights < needed(1, zero3).weights
    assert needed(8, zero1).activations > needed(1, zero1).activations, "tokens of other ranks"
