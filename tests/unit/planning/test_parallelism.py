"""Degrees of parallelism: what they are when nothing is said, and which a run file or a model does not allow."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.errors import ConfigError, UserError
from hyperpod_ft.planning.layout import Degrees, copies_over_tensor
from hyperpod_ft.planning.model_fit import check_model_directory, check_trainable
from hyperpod_ft.planning.model_shape import model_shape
from hyperpod_ft.planning.neuron import rules as neuron_rules
from hyperpod_ft.planning.neuron.limits import uses_flash_attention
from hyperpod_ft.planning.parallelism import check_model, degrees_of
from hyperpod_ft.planning.torch.memory import has_sequence_parallel
from tests.conftest import MakeRun

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}


def neuron(**overrides: Any) -> dict[str, Any]:
    """A run file's values for engine neuron on trn1."""
    return {"engine": "neuron", "cluster__instance_type": "trn1.32xlarge", "parallelism": {}} | overrides


@pytest.mark.parametrize(
    ("overrides", "degree"),
    [
        (neuron(), 8),
        (neuron(cluster__instance_type="ml.trn1n.32xlarge"), 8),
        (neuron(cluster__instance_type="trn2.48xlarge"), 4),
        (neuron(cluster__instance_type="trn2.3xlarge"), 4),
        (neuron(parallelism={"ranks_per_node": 2}), 2),
        (neuron(parallelism={"tensor_parallel": 1}), 1),
        ({"parallelism": {"ranks_per_node": 4}}, 1),
        ({"cluster__instance_type": "p5.48xlarge", "parallelism": {}}, 1),
    ],
)
def test_tensor_parallelism_when_nothing_is_said(make_run: MakeRun, overrides: dict[str, Any], degree: int) -> None:
    assert make_run(**overrides).plan.degrees.tensor_parallel == degree


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            {"dataset__max_length": 2044},
            "8 does not divide dataset.max_length 2044; .* to 2048, or tensor_parallel to 1, 2 or 4$",
        ),
        ({"dataset__max_length": 2044, "neuron__sequence_parallel": False, "training__precision": "fp32"}, None),
        ({"dataset__max_length": 2044, "parallelism": {"tensor_parallel": 1}}, None),
        ({"neuron__sequence_parallel": False}, "neuron.sequence_parallel: .* 8 tensor-parallel ranks; set it to true"),
        ({"neuron__sequence_parallel": False, "training__precision": "fp32"}, None),
        (
            {"neuron__sequence_parallel": False, "training__method": "full"},
            "neuron.sequence_parallel: .* 8 tensor-parallel ranks; set it to true",
        ),
        ({"neuron__sequence_parallel": False, "parallelism": {"tensor_parallel": 1}}, None),
    ],
)
def test_sequence_parallelism(make_run: MakeRun, overrides: dict[str, Any], words: str | None) -> None:
    with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
        degrees_of(make_run(**neuron(**overrides)).config)


@pytest.mark.parametrize(
    ("given", "length", "words"),
    [
        (
            True,
            1022,
            "sequence_parallel: tensor_parallel 4 .* 511 tokens of a row on each rank; .* a multiple of 8,",
        ),
        (True, 1024, None),
        (None, 1022, None),
        (False, 1022, None),
    ],
)
def test_sequence_parallelism_of_engine_torch(
    make_run: MakeRun, given: bool | None, length: int, words: str | None
) -> None:
    degrees = {"ranks_per_node": 8, "tensor_parallel": 4, "context_parallel": 2, "sequence_parallel": given}
    with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
        config = make_run(dataset__max_length=length, parallelism=degrees).config
        assert has_sequence_parallel(config, degrees_of(config)) == (length == 1024)


@pytest.mark.parametrize(
    ("instance_type", "nodes", "degrees", "sdk", "words"),
    [
        (
            "trn1.32xlarge",
            1,
            (4, 2),
            "2.28.0",
            "pipeline_parallel: 2 does not divide cluster.nodes 1, .* set it to 1, or choose",
        ),
        (
            "trn1n.32xlarge",
            3,
            (4, 2),
            "2.26.1",
            "pipeline_parallel: 2 does not divide cluster.nodes 3, .* set it to 1 or 3, or",
        ),
        ("trn1.32xlarge", 4, (4, 2), "2.26.1", None),
        ("trn1.32xlarge", 1, (4, 1), "2.26.1", None),
        ("trn1.32xlarge", 1, (8, 2), "2.26.1", None),
        ("trn2.48xlarge", 1, (4, 2), "2.26.1", None),
        ("trn2.48xlarge", 2, (64, 1), "2.26.1", "fails with 64 on trn2; set it to 32, or set env.sdk to 2.28.0"),
        ("trn2.48xlarge", 2, (64, 1), "2.28.0", None),
        ("trn2.48xlarge", 2, (32, 1), "2.26.1", None),
    ],
)
def test_groups_that_neuronx_distributed_cannot_make(
    make_run: MakeRun, instance_type: str, nodes: int, degrees: tuple[int, int], sdk: str, words: str | None
) -> None:
    overrides = neuron(
        cluster__instance_type=instance_type,
        cluster__nodes=nodes,
        parallelism={"tensor_parallel": degrees[0], "pipeline_parallel": degrees[1]},
        env={"sdk": sdk},
    )
    with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
        degrees_of(make_run(**overrides).config)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"neuron__flash_attention": True, "dataset__max_length": 3072}, "3072 is not a multiple of 2048"),
        ({"neuron__fuse_qkv": True}, "neuron.fuse_qkv: .* LoRA; set it to false"),
        ({"lora__target_modules": ["q_proj", "up_proj"]}, "name both or none"),
    ],
)
def test_run_files_that_engine_neuron_cannot_train(make_run: MakeRun, overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_run(**neuron(**overrides))


def test_flash_attention_is_used_where_rows_have_its_length(make_run: MakeRun) -> None:
    def used(**overrides: Any) -> bool:
        return uses_flash_attention(make_run(**neuron(**overrides)).config)

    assert used(dataset__max_length=4096) and used(dataset__max_length=4096, neuron__flash_attention=True)
    assert not used(dataset__max_length=1024)
    assert not used(dataset__max_length=4096, neuron__flash_attention=False)


@pytest.mark.parametrize(
    ("tensor_parallel", "engine", "changes", "words"),
    [
        (3, "torch", {}, "does not divide the model's 8 attention heads; set it to 1, 2, 4 or 8$"),
        (8, "torch", {}, None),
        (4, "torch", {"num_attention_heads": 12, "num_key_value_heads": 6}, "neither divides the model's 6 key/value"),
        (8, "torch", {"model_type": "phi3"}, "8 is more than the 4 key/value heads of a phi3 .* set it to 1, 2 or 4$"),
        (4, "torch", {}, None),
        (
            4,
            "torch",
            {"intermediate_size": 190},
            "4 does not divide the model's intermediate size 190; set it to 1 or 2$",
        ),
        (4, "torch", {"vocab_size": 511}, None),
        (8, "neuron", {}, None),
        (8, "neuron", {"vocab_size": 508}, "8 does not divide the model's vocabulary 508; set it to 1, 2 or 4$"),
        (8, "neuron", {"intermediate_size": 188}, "8 does not divide the model's intermediate size 188"),
        (4, "neuron", {"num_attention_heads": 12, "num_key_value_heads": 6}, "4 and the model's 6 key/value heads"),
        (8, "neuron", {"attention_bias": True}, "biases"),
        (8, "neuron", {"model_type": "mistral"}, "type 'mistral'; .* llama, qwen3"),
        (8, "neuron", {"model_type": "granite"}, None),
    ],
)
def test_what_divides_a_model(
    make_run: MakeRun, tensor_parallel: int, engine: str, changes: dict[str, Any], words: str | None
) -> None:
    config = make_run(**(neuron() if engine == "neuron" else {})).config
    degrees = Degrees(1, tensor_parallel, tensor_parallel, 1)
    with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
        check_trainable(config, degrees, LLAMA | changes)


@pytest.mark.parametrize(
    ("context", "tensor", "model_config", "words"),
    [
        (4, 1, {}, None),
        (2, 4, {}, None),
        (8, 1, {}, None),
        (3, 1, {}, "3 does not divide dataset.max_length 2048; set max_length to 2049, or context_parallel to a"),
        (4, 4, {}, "tensor_parallel 4 x context_parallel 4 = 16 does not divide the model's 8 attention heads"),
        (16, 1, {"model_type": "gemma2"}, "16 does not divide the model's 8 attention heads; .* 1, 2, 4 or 8$"),
        (16, 1, {"model_type": "gpt2", "num_attention_heads": None, "n_head": 8}, "the model's 8 attention heads"),
        (2, 1, {"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type dynamic .* set it to 1$"),
        (2, 1, {"rope_parameters": {"rope_type": "longrope"}}, "rope_type longrope"),
        (2, 1, {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "rope_type longrope"),
        (2, 1, {"rope_parameters": {"rope_type": "llama3", "factor": 8}}, None),
        (1, 1, {"rope_parameters": {"rope_type": "longrope"}}, None),
    ],
)
def test_rows_that_can_be_shared(
    make_run: MakeRun, tmp_path: Path, context: int, tensor: int, model_config: dict[str, Any], words: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | model_config))
    parallelism = {"ranks_per_node": tensor * context, "tensor_parallel": tensor, "context_parallel": context}
    with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
        settings = {"dataset__max_length": 2048, "dataset__packing": "none", "training__method": "full"}
        config = make_run(**settings, parallelism=parallelism).config
        check_model_directory(config, degrees_of(config), tmp_path)


@pytest.mark.parametrize(
    ("family", "stages", "words"),
    [("llama", 4, None), ("llama", 8, "8 pipeline parts for 6 layers"), ("granite", 2, "granite models; set it to 1")],
)
def test_pipelines(make_run: MakeRun, family: str, stages: int, words: str | None) -> None:
    """Six layers on four stages are 1, 1, 2 and 2: neuronx-distributed does that."""
    with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
        check_trainable(make_run(**neuron()).config, Degrees(1, 32, 4, stages), LLAMA | {"model_type": family})


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "gpt_neox", "opt"])
def test_only_causal_models_are_trained(make_run: MakeRun, tmp_path: Path, family: str) -> None:
    """transformers' class for causal models takes encoders too, whose attention would see the targets."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    config = make_run(dataset__packing="none", parallelism={"ranks_per_node": 1}).config
    words = f"^model.source: models of type {family} are not causal language models; choose"
    with contextlib.nullcontext() if family in ("gpt_neox", "opt") else pytest.raises(UserError, match=words):
        check_model_directory(config, degrees_of(config), tmp_path)


@pytest.mark.parametrize(
    ("family", "targets", "words"),
    [
        ("llama", ["q_proj", "1.mlp.up_proj", "embed_tokens", "lm_head"], None),
        (
            "llama",
            ["q_proj", "c_attn"],
            "'c_attn' matches .* that it has: down_proj, embed_tokens, gate_proj, k_proj, ",
        ),
        ("llama", ["99.mlp.up_proj"], "'99.mlp.up_proj' matches"),
        ("llama", ["proj"], "'proj' matches"),
        ("gpt_neox", ["q_proj"], "it has: dense, dense_4h_to_h, dense_h_to_4h, embed_in, lm_head, query_key_value$"),
        ("phi3", None, None),
        ("gpt2", None, None),
    ],
    ids=str,
)
def test_targets_that_a_family_has(
    make_run: MakeRun, tmp_path: Path, family: str, targets: list[str] | None, words: str | None
) -> None:
    """Before anything is submitted; training all parameters needs none."""
    model = LLAMA | {"model_type": family}
    if family == "gpt2":
        model |= {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
    (tmp_path / "config.json").write_text(json.dumps(model))
    given = {"lora__target_modules": targets} if targets else {}
    for method in ("lora", "full"):
        config = make_run(parallelism={"ranks_per_node": 1}, training__method=method, **given).config
        refused = words is not None and method == "lora"
        expected = f"^lora.target_modules: .*{words}" if refused else ""
        with pytest.raises(UserError, match=expected) if refused else contextlib.nullcontext():
            check_model_directory(config, degrees_of(config), tmp_path)


def test_one_rank_has_no_zero_1(make_run: MakeRun) -> None:
    config = make_run(**neuron()).config
    assert [neuron_rules.sharding(config, Degrees(1, ranks, 8, 1), None) for ranks in (8, 32)] == [
        "replicated",
        "zero1 over 4 ranks",
    ]


def test_the_ranks_of_one_node(make_run: MakeRun) -> None:
    uneven = {"tensor_parallel": 1, "pipeline_parallel": 3, "ranks_per_node": 8}
    with pytest.raises((UserError, ConfigError), match="= 3 does not divide 1 node x 8 ranks = 8"):
        degrees_of(make_run(parallelism=uneven, cluster__nodes=1).config)


@pytest.mark.parametrize(
    ("kv_heads", "targets", "words"),
    [
        (8, ["q_proj", "v_proj"], None),
        (4, ["q_proj", "v_proj"], "q_proj, k_proj and v_proj .* 4 key/value heads .*; name all three or none"),
        (4, ["q_proj", "k_proj", "v_proj"], None),
        (4, ["o_proj"], None),
    ],
)
def test_adapters_of_fused_projections(make_run: MakeRun, kv_heads: int, targets: list[str], words: str | None) -> None:
    config = make_run(**neuron(lora__target_modules=targets)).config
    shape = model_shape(LLAMA | {"num_key_value_heads": kv_heads})
    assert shape is not None
    with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
        check_model(config, degrees_of(config), shape)


@pytest.mark.parametrize(("kv_heads", "words"), [(8, None), (4, "8 query heads and 4 key/value heads")])
def test_only_equal_numbers_of_heads_are_fused(make_run: MakeRun, kv_heads: int, words: str | None) -> None:
    config = make_run(**neuron(training__method="full", neuron__fuse_qkv=True)).config
    shape = model_shape(LLAMA | {"num_key_value_heads": kv_heads})
    assert shape is not None
    with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
        check_model(config, degrees_of(config), shape)


@pytest.mark.parametrize(
    ("kv_heads", "tensor_parallel", "copies"), [(8, 8, 1), (8, 32, 4), (4, 8, 2), (2, 8, 4), (8, 4, 1)]
)
def test_copies_of_key_value_heads(kv_heads: int, tensor_parallel: int, copies: int) -> None:
    assert copies_over_tensor(kv_heads, tensor_parallel) == copies
