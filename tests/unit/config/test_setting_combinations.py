"""Settings that do not go together are refused."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.config.run_files import load, refused


def test_templates_belong_to_their_format(tmp_path: Path) -> None:
    assert "completion_template" in refused(tmp_path, dataset__format="template")
    assert "format template, not dolly" in refused(tmp_path, dataset__prompt_template="x")


def test_engine_neuron_on_several_nodes_needs_a_volume(tmp_path: Path) -> None:
    section = {"region": "us-west-2", "role": "arn:aws:iam::111122223333:role/r", "store": "s3://bucket/ft"}
    neuron = {"engine": "neuron", "cluster__instance_type": "trn1.32xlarge", "sagemaker": section}
    assert "set sagemaker.file_system instead" in refused(tmp_path, cluster__nodes=2, **neuron)
    assert load(tmp_path, **neuron).sagemaker


def test_engines_and_instances_fit(tmp_path: Path) -> None:
    assert "engine neuron needs a trn instance" in refused(tmp_path, engine="neuron")
    assert "unknown instance type" in refused(tmp_path, cluster__instance_type="trn9")
    assert "does not run on trn1" in refused(tmp_path, cluster__instance_type="trn1.32xlarge")
    assert load(tmp_path, cluster__instance_type="ml.p5.48xlarge").cluster.instance_type == "p5.48xlarge"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parallelism__offload", "optimizer"),
        ("parallelism__offload", "parameters"),
        ("training__activation_offload", True),
        ("training__optimizer_state", "int8"),
        ("lora__quantization", "nf4"),
        ("cluster__environment", {"TORCH_NEURONX_NEFF_CACHE_DIR": "/tmp/cache"}),
        ("cluster__environment", {"TORCH_NEURONX_NEFF_DISABLE_CACHE": "1"}),
        ("cluster__environment", {"NEURON_LOGICAL_NC_CONFIG": "1"}),
    ],
)
def test_what_engine_torch_has_not_on_trainium(tmp_path: Path, key: str, value: object) -> None:
    trainium = {"cluster__instance_type": "trn2.48xlarge", "env": {}, "parallelism__tensor_parallel": 1}
    assert load(tmp_path, **trainium).env.python is None, "stage env installs TorchNeuron"
    said = refused(tmp_path, **trainium, **{key: value})
    assert key.replace("__", ".") in said and len(said.splitlines()) == 1
    if key != "cluster__environment":
        assert load(tmp_path, cluster__instance_type="p5.48xlarge", parallelism__tensor_parallel=1, **{key: value})


@pytest.mark.parametrize(
    ("key", "value"), [("dora", True), ("plus_ratio", 16), ("quantization", "nf4"), ("modules_to_save", ("lm_head",))]
)
def test_variants_of_lora_are_for_engine_torch(tmp_path: Path, key: str, value: object) -> None:
    lora = {f"lora__{key}": value, "parallelism": {"tensor_parallel": 1, "ranks_per_node": 1}}
    assert getattr(load(tmp_path, **lora).lora, key) == value
    said = refused(tmp_path, engine="neuron", cluster__instance_type="trn1.32xlarge", **lora)
    assert f"lora.{key}: only engine torch supports it" in said and len(said.splitlines()) == 1
    full = {"engine": "neuron", "cluster__instance_type": "trn1.32xlarge", "training__method": "full"}
    assert load(tmp_path, **full, **lora), "section lora has no effect"


def test_new_tokens_and_continued_adapters_are_for_engine_torch(tmp_path: Path) -> None:
    neuron = {"engine": "neuron", "cluster__instance_type": "trn1.32xlarge", "model__new_tokens": ["<tool>"]}
    assert "model.new_tokens: only engine torch supports it" in refused(tmp_path, parallelism={}, **neuron)
    continued = neuron | {"model__new_tokens": [], "model__adapter": {"source": "any/adapter"}}
    assert "model.adapter: only engine torch supports it" in refused(tmp_path, parallelism={}, **continued)
    assert load(tmp_path, training__method="full", parallelism={}, **neuron).model.new_tokens


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("parallelism.context_parallel", 2, "set it to 1"),
        ("parallelism.degrees", "auto", "set it to manual"),
        ("parallelism.offload", "optimizer", "set it to none"),
        ("parallelism.pipeline_schedule", "gpipe", "set it to 1f1b"),
        ("parallelism.virtual_pipeline_parallel", 4, "set it to 2"),
        ("parallelism.shard_ranks", 2, "leave it out"),
        ("parallelism.sharding", "zero1", "set it to auto"),
        ("training.activation_offload", True, "set it to false"),
        ("training.compile", True, "leave it out"),
        ("training.validate_every_steps", 10, "leave it out"),
        ("training.optimizer_state", "bf16", "set it to fp32"),
        ("training.save_only_model", True, "set it to false"),
        ("training.memory_checkpoint_every_steps", 10, "leave it out"),
    ],
)
def test_engine_neuron_has_not_the_settings_of_engine_torch(
    tmp_path: Path, key: str, value: object, remedy: str
) -> None:
    neuron = {"engine": "neuron", "cluster__instance_type": "trn1.32xlarge", "dataset__validation_share": 0.02}
    section, name = key.split(".")
    said = refused(tmp_path, **neuron, **{section: {name: value}})
    assert f"{key}: only engine torch supports it; {remedy}" in said


def test_engine_neuron_accepts_what_is_turned_off(tmp_path: Path) -> None:
    neuron = {"engine": "neuron", "cluster__instance_type": "trn1.32xlarge", "training__compile": False}
    assert load(tmp_path, **neuron).training.compile is False


def test_weights_in_4_bits_are_not_divided(tmp_path: Path) -> None:
    four = {"lora__quantization": "nf4"}
    assert "lora.quantization" in refused(tmp_path, **four, training__method="full")
    assert "set parallelism.tensor_parallel to 1" in refused(tmp_path, **four, parallelism={"tensor_parallel": 2})


PREFERENCE = {"training__objective": "dpo", "dataset__format": "preference"}


def test_objective_and_format_go_together(tmp_path: Path) -> None:
    config = load(tmp_path, **PREFERENCE, dpo={"beta": 0.3})
    assert (config.dpo.beta, config.dpo.label_smoothing, config.dataset.documents_per_example) == (0.3, 0.0, 2)
    for key, value in PREFERENCE.items():
        assert " and format preference go together" in refused(tmp_path, **{key: value})
    assert "dpo.label_smoothing" in refused(tmp_path, **PREFERENCE, dpo={"label_smoothing": 0.5})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dataset__packing": "wrapped"}, "dataset.packing: wrapped would cut a pair in two"),
        ({"dataset__loss_on": "all"}, "dataset.loss_on: "),
        (
            {"parallelism": {"pipeline_parallel": 2}},
            "parallelism.pipeline_parallel: objective dpo does not support pipelines; set it to 1",
        ),
        (
            {"parallelism": {"context_parallel": 2}},
            "parallelism.context_parallel: objective dpo needs all tokens of a pair on one rank",
        ),
        ({"cluster__instance_type": "trn2.48xlarge", "env__python": "/opt/python"}, "use a GPU instance type"),
        ({"engine": "neuron", "cluster__instance_type": "trn1.32xlarge"}, "only engine torch supports dpo"),
    ],
)
def test_what_preferences_do_not_go_with_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    assert words in refused(tmp_path, **PREFERENCE, **changes)


def test_a_schedule_without_a_pipeline_is_refused(tmp_path: Path) -> None:
    for schedule in ("interleaved", "gpipe"):
        given = {"parallelism": {"pipeline_schedule": schedule}}
        assert "parallelism.pipeline_schedule: has no effect without a pipeline" in refused(tmp_path, **given)
    given = {"parallelism": {"pipeline_parallel": 2, "virtual_pipeline_parallel": 4}}
    assert "has no effect without pipeline_schedule interleaved" in refused(tmp_path, **given)


def test_memory_checkpoints_are_more_frequent_than_others(tmp_path: Path) -> None:
    every = {"training__memory_checkpoint_every_steps": 10}
    assert load(tmp_path, **every).training.save_every_steps == 100
    assert "10 is not below save_every_steps 10; lower it" in refused(tmp_path, **every, training__save_every_steps=10)
    assert "no effect with save_only_model" in refused(tmp_path, **every, training__save_only_model=True)


def test_activations_that_the_engine_does_not_recompute_are_refused(tmp_path: Path) -> None:
    every = {"training__activation_checkpointing_every": 2}
    assert "activation_checkpointing_every: has no effect" in refused(tmp_path, **every)
    neuron = {"engine": "neuron", "cluster__instance_type": "trn1.32xlarge"}
    for settings, key in (
        ({"training__activation_checkpointing": "selective"}, "activation_checkpointing"),
        ({"training__activation_checkpointing": "full"} | every, "activation_checkpointing"),
    ):
        assert f"training.{key}: " in refused(tmp_path, **neuron, **settings)


@pytest.mark.parametrize("pattern", ["(", "a{2}{3}*", "(?P<n", "x" * 501])
def test_a_pattern_that_is_none_is_refused(tmp_path: Path, pattern: str) -> None:
    assert "generate.answer_pattern" in refused(tmp_path, generate__answer_pattern=pattern)


def test_only_engine_torch_continues_an_adapter(tmp_path: Path) -> None:
    given = {"model": {"source": "org/base", "adapter": {"source": "org/adapter"}}}
    parallelism = {"parallelism": {"tensor_parallel": 1, "ranks_per_node": 1}}
    assert load(tmp_path, **given, **parallelism).model.adapter
    said = refused(tmp_path, engine="neuron", cluster__instance_type="trn1.32xlarge", **given, **parallelism)
    assert "model.adapter: only engine torch" in said and len(said.splitlines()) == 1


def test_a_module_is_trained_whole_or_has_an_adapter(tmp_path: Path) -> None:
    said = refused(tmp_path, lora__target_modules=["q_proj", "lm_head"], lora__modules_to_save=["lm_head"])
    assert "lora" in said and "modules_to_save: lm_head" in said and len(said.splitlines()) == 1


def test_an_empty_prompt_is_refused(tmp_path: Path) -> None:
    assert "generate.prompts: number 1 is empty" in refused(tmp_path, generate__prompts=["a", " \n"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dataset__max_target_length": 64, "dataset__format": "dolly"}, "encoder-decoders"),
        ({"deploy__model": "adapter", "lora__dora": True}, "DoRA"),
        ({"deploy__model": "adapter", "lora__r": 1024}, "rank 512 or less"),
        ({"deploy__model": "adapter", "lora__modules_to_save": ["lm_head"]}, "whole modules"),
        ({"deploy__model": "adapter", "training__method": "full"}, "no adapter"),
    ],
)
def test_what_no_endpoint_serves_is_refused_before_the_training(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    deploy = {"deploy": {"instance_type": "g6.2xlarge"}, "parallelism": {"tensor_parallel": 1}}
    assert load(tmp_path, **{key: value for key, value in settings.items() if not key.startswith("deploy")})
    refusal = refused(tmp_path, **deploy, **settings)
    assert said in refusal and "deploy" in refusal and len(refusal.splitlines()) == 1
