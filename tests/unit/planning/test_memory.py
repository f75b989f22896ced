"""The estimate of accelerator memory, compared with published sizes and with autograd."""

import json
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from hyperpod_ft.config import run_file
from hyperpod_ft.planning.memory import GIB, Memory
from hyperpod_ft.planning.model_fit import check_memory
from hyperpod_ft.planning.model_shape import model_shape
from hyperpod_ft.planning.neuron.memory import NeuronMemory
from hyperpod_ft.planning.parallelism import check_model, degrees_of
from hyperpod_ft.shipped import shipped
from scripts.memory_table import LLAMA_3_8B, LLAMA_3_70B, QWEN3_8B
from tests.unit.planning.memory_estimates import MakeRun, estimated, shape_of, trn1


@pytest.mark.parametrize(
    ("model_config", "parameters"),
    [(LLAMA_3_8B, 8_030_261_248), (LLAMA_3_70B, 70_553_706_496), (QWEN3_8B, 8_190_735_360)],
)
def test_parameters_are_the_published_ones(model_config: dict[str, Any], parameters: int) -> None:
    assert shape_of(model_config).parameters == parameters


# EleutherAI/gpt-j-6b's config.json
GPTJ_6B: dict[str, Any] = {
    "model_type": "gptj",
    "n_embd": 4096,
    "n_head": 16,
    "n_inner": None,
    "n_layer": 28,
    "n_positions": 2048,
    "rotary_dim": 64,
    "tie_word_embeddings": False,
    "vocab_size": 50400,
}


def tiny(**changes: Any) -> dict[str, Any]:
    values = json.loads((shipped("examples/quickstart/tiny-llama") / "config.json").read_text(encoding="utf-8"))
    values.pop("architectures")
    return values | changes


TINY = [
    tiny(),
    tiny(tie_word_embeddings=True),
    tiny(attention_bias=True, mlp_bias=True),
]


@pytest.mark.parametrize("values", TINY, ids=["plain", "tied", "biases"])
def test_parameters_are_those_of_transformers(values: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    assert shape_of(values).parameters == sum(p.numel() for p in model.parameters())


def test_other_families_have_no_shape() -> None:
    assert model_shape({"model_type": "bloom", "hidden_size": 8}) is None
    assert model_shape(LLAMA_3_8B | {"model_type": "mixtral"}) is None


def test_incomplete_configs_have_no_shape() -> None:
    assert model_shape({"model_type": "llama"}) is None
    assert model_shape({"model_type": "gpt2", "n_embd": 8}) is None
    assert model_shape(LLAMA_3_8B | {"hidden_size": "wide"}) is None
    assert model_shape({}) is None


def test_llama_3_8b_full_on_trn1(make_run: MakeRun) -> None:
    """By hand: P/8 parameters on a rank, TP=8 x DP=4; bf16 weights, fp32 sums of gradients, ZeRO-1 over DP."""
    memory = estimated(trn1(make_run, training__method="full"), LLAMA_3_8B)
    share = 8_030_261_248 / 8
    assert memory.weights == pytest.approx(2 * share, rel=1e-3)
    assert memory.gradients == pytest.approx((4 + 4 / 4) * share, rel=1e-3)
    assert memory.optimizer == pytest.approx(12 / 4 * share, rel=1e-3)
    # the input of each of 32 layers, divided by sequence parallelism
    assert memory.activations == pytest.approx(32 * 2 * 2048 * 4096 / 8, rel=0.01)
    # bf16 logits, fp32 logits, fp32 softmax over an eighth of the vocabulary
    assert memory.logits == pytest.approx(10 * 2048 * 128256 / 8, rel=0.03)  # and the last norm


def test_frozen_weights_have_neither_gradients_nor_optimizer(make_run: MakeRun) -> None:
    memory = estimated(trn1(make_run), LLAMA_3_8B)
    assert memory.weights == pytest.approx(8_030_261_248 / 8 * 2, rel=0.06), "and adapters, half of which are whole"
    assert memory.gradients + memory.optimizer < 0.3 * GIB


@pytest.mark.parametrize(
    ("part", "saving", "costing"),
    [
        ("activations", {"training__activation_checkpointing": "full"}, {"training__activation_checkpointing": "none"}),
        (
            "activations",
            {"training__precision": "fp32"},
            {"training__precision": "fp32", "neuron__sequence_parallel": False},
        ),
        ("activations", {}, {"training__micro_batch_size": 2}),
        ("logits", {}, {"training__micro_batch_size": 2}),
        ("optimizer", {}, {"neuron__zero_1": False}),
        ("weights", {}, {"training__precision": "fp32"}),
        ("weights", {"parallelism": {"tensor_parallel": 16}}, {}),
        ("weights", {"parallelism": {"tensor_parallel": 8, "pipeline_parallel": 2}}, {}),
        ("optimizer", {"cluster__nodes": 2}, {}),
        ("optimizer", {"neuron__master_weights": False}, {}),
        ("optimizer", {"training__method": "lora"}, {}),
        (
            "activations",
            {"neuron__flash_attention": None, "training__activation_checkpointing": "none"},
            {"neuron__flash_attention": False, "training__activation_checkpointing": "none"},
        ),
        (
            "activations",
            {"training__method": "lora", "training__activation_checkpointing": "none"},
            {"training__method": "lora", "training__activation_checkpointing": "none", "lora__dropout": 0.1},
        ),
    ],
)
def test_what_saves_memory(make_run: MakeRun, part: str, saving: dict[str, Any], costing: dict[str, Any]) -> None:
    less, more = (
        estimated(trn1(make_run, **{"training__method": "full"} | overrides), LLAMA_3_8B)
        for overrides in (saving, costing)
    )
    assert getattr(less, part) < getattr(more, part)


def test_variants_of_lora_need_what_they_add(make_run: MakeRun) -> None:
    def memory(**overrides: Any) -> Memory:
        settings = {"engine": "torch", "cluster__instance_type": "p5.48xlarge", "parallelism": {"ranks_per_node": 1}}
        return estimated(make_run(**settings, **overrides).config, LLAMA_3_8B)

    plain, four, dora = memory(), memory(lora__quantization="nf4"), memory(lora__dora=True)
    # the seven matrices of 32 layers, 218,103,808 parameters each, at 4.5 bits on every rank
    codes = 32 * 218_103_808 * 4.5 / 8
    assert four.weights == plain.weights - 32 * 218_103_808 * 2 + codes
    assert (four.optimizer, four.activations) == (plain.optimizer, plain.activations)
    outputs = 32 * (4096 + 1024 + 1024 + 4096 + 14336 + 14336 + 4096)
    assert dora.optimizer - plain.optimizer == outputs * 8
    assert dora.activations - plain.activations == outputs * 2 * 2048


def test_pipeline_stages_share_the_model(make_run: MakeRun) -> None:
    config = trn1(make_run, training__method="full", parallelism={"tensor_parallel": 8, "pipeline_parallel": 4})
    shape = shape_of(LLAMA_3_8B | {"num_hidden_layers": 30})
    stages = NeuronMemory(config, degrees_of(config), shape).stages
    assert [stage.layers for stage in stages] == [7, 7, 8, 8]
    assert 8 * sum(stage.parameters for stage in stages) == pytest.approx(shape.parameters, rel=1e-3)
    assert [stage.in_flight for stage in stages] == [1, 1, 1, 1], "one row a step is one micro batch"
    config = trn1(make_run, parallelism={"pipeline_parallel": 4}, training__gradient_accumulation_steps=8)
    stages = NeuronMemory(config, degrees_of(config), shape).stages
    assert [stage.in_flight for stage in stages] == [4, 3, 2, 1]


def test_engine_torch_by_sharding(make_run: MakeRun) -> None:
    """Bytes for each of Llama 3 8B's parameters, trained in full on eight ranks in bf16: docs/parallelism.md."""

    def on_p5(sharding: str, **overrides: Any) -> Memory:
        values = {"cluster__instance_type": "p5.48xlarge", "training__method": "full"}
        given = {"parallelism": {"sharding": sharding}}
        return estimated(make_run(**values | given | overrides).config, LLAMA_3_8B)

    parameters, ends, layer, bucket = 8_030_261_248, 1_050_677_248, 218_112_000, 4 * 128_256 * 4096
    # the embedding is larger than a bucket; FSDP2 reduces it and the output matrix last, from bf16 and sent in fp32
    reduced = 6 * ends / parameters
    for sharding, *expected in (
        ("replicated", 2, 4 + bucket / parameters, 12),
        ("zero1", 2, 4 / 8 + 2 * bucket / parameters, 12 / 8),
        # a layer's gradients, which are replaced by those of others in the backward pass
        ("zero2", 4 / 8 + 2, 6 * layer / parameters, 8 / 8),
        # embedding, output matrix and three of 32 layers are gathered at once
        ("zero3", 4 / 8 + 2 * (ends + 3 * layer) / parameters, 4 / 8 + reduced, 8 / 8),
    ):
        memory = on_p5(sharding)
        each = [value / parameters for value in (memory.weights, memory.gradients, memory.optimizer)]
        assert each == pytest.approx(expected, rel=1e-3), sharding
    accumulated = {"training__gradient_accumulation_steps": 2}
    assert on_p5("zero1", **accumulated).gradients == pytest.approx(parameters * 4 + bucket), (
        "until the last micro batch"
    )
    assert on_p5("zero2", **accumulated).gradients == pytest.approx(parameters * 4 / 8 + 6 * layer, rel=1e-3)
    # before the gradients, two layers as received
    lora = on_p5("zero2", training__method="lora").gradients
    assert lora == pytest.approx(2 * 2 * layer, rel=0.02)
    halved = {"parallelism": {"sharding": "zero3", "shard_ranks": 4}}
    assert on_p5("", **halved, **accumulated).gradients == pytest.approx(parameters * (4 / 4 + reduced))
    assert on_p5("zero1", training__optimizer_state="bf16").optimizer == pytest.approx(parameters * 8 / 8)
    assert on_p5("zero1", training__optimizer_state="int8").optimizer == pytest.approx(parameters * 6.03125 / 8)
    offloaded = on_p5("", parallelism={"sharding": "zero1", "offload": "optimizer"})
    assert offloaded.optimizer == 0 and offloaded.gradients == 2 * bucket
    everything = on_p5("", parallelism={"offload": "parameters"})
    assert everything.weights == pytest.approx(2 * (ends + 3 * layer), rel=1e-3)
    assert (everything.gradients, everything.optimizer) == (pytest.approx(6 * ends), 0)
    checkpointed = on_p5("zero3", training__activation_checkpointing="full")
    assert checkpointed.activations < on_p5("zero3").activations
    divided, eager = {"parallelism": {"tensor_parallel": 4}}, {"training__compile": False}
    assert on_p5("", **divided, **eager).logits == on_p5("zero3", **eager).logits, (
        "a quarter of the words, of four times the tokens"
    )
    assert on_p5("", **divided).logits < on_p5("zero3").logits, "a compiler fuses larger blocks, of a whole head"


@pytest.mark.parametrize(
    ("recipe", "model_config", "gib"),
    [
        ("llama3-8b-dolly-lora-trn1", LLAMA_3_8B, 2.4),
        ("llama3-8b-full-trn1", LLAMA_3_8B, 9.7),
        ("qwen3-8b-lora-trn2", QWEN3_8B, 4.9),
        ("llama3-8b-lora-trn2", LLAMA_3_8B, 4.5),
        ("qwen3-8b-full-trn2", QWEN3_8B, 4.9),
        ("llama3-70b-lora-trn1", LLAMA_3_70B, 5.7),
        ("gptj-6b-full-p4d", GPTJ_6B, 31.6),
        ("gptj-6b-sst2-p4d", GPTJ_6B, 23.5),
        ("llama3-8b-dpo-p5", LLAMA_3_8B, 29.2),
        ("qwen3-8b-lora-training-job", QWEN3_8B, 17.7),
        ("qwen3-8b-full-training-job", QWEN3_8B, 27.4),
        ("qwen3-vl-8b-lora-g6e", {"text_config": QWEN3_8B | {"model_type": "qwen3_vl_text"}}, 17.6),
    ],
)
def test_recipes_fit(recipe: str, model_config: dict[str, Any], gib: float) -> None:
    config = run_file.load(run_file.find(recipe))
    shape = shape_of(model_config)
    check_model(config, degrees_of(config), shape)
    memory = check_memory(config, degrees_of(config), shape)
    assert memory is not None and memory.total / GIB == pytest.approx(gib, abs=0.05)
