"""What engine trl takes of a run file: TRL's own settings by their names and types, and the limits of the engine."""

import dataclasses
import json
import typing
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers import TrainerControl
from transformers.training_args import OptimizerNames
from trl.trainer.distillation_config import DistillationConfig
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.kto_config import KTOConfig
from trl.trainer.reward_config import RewardConfig
from trl.trainer.rloo_config import RLOOConfig
from trl.trainer.sft_config import SFTConfig

from hyperpod_ft.config.run_file import validate
from hyperpod_ft.engines.interface import TrainingProgress
from hyperpod_ft.engines.trl.arguments import arguments
from hyperpod_ft.engines.trl.callback import StepsFollower
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.certificate import Certificate
from hyperpod_ft.planning.layout import Sharding
from hyperpod_ft.planning.model_fit import check_model_directory, check_trainable
from hyperpod_ft.planning.parallelism import degrees_of
from hyperpod_ft.planning.trl import limits, rules, settings
from hyperpod_ft.runs.run import Run
from scripts.memory_table import LLAMA_3_8B
from tests.conftest import MakeRun
from tests.pages.blocks import blocks
from tests.unit.config.run_files import load, refused
from tests.unit.planning.memory_estimates import estimated, shape_of

ROOT = Path(__file__).resolve().parents[4]
CONFIGS = {
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "kto": KTOConfig,
    "reward": RewardConfig,
    "grpo": GRPOConfig,
    "rloo": RLOOConfig,
    "distillation": DistillationConfig,
}
TRL: dict[str, Any] = {"engine": "trl", "cluster__instance_type": "p5.48xlarge"}
TRL |= {"parallelism__tensor_parallel": 1, "parallelism__ranks_per_node": 8}
QWEN3_MOE = {
    **{"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768},
    **{"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
    **{"num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936},
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "sft": {},
    "dpo": {"training__objective": "dpo", "dataset__format": "preference", "dataset__packing": "none"},
    "kto": {
        "training__objective": "kto",
        "dataset__format": "unpaired-preference",
        "training__micro_batch_size": 2,
    },
    "reward": {"training__objective": "reward", "dataset__format": "preference"},
    **{
        name: {"training__objective": name, "dataset__format": "prompt", "reward": [{"function": "json"}]}
        for name in ("grpo", "rloo")
    },
    "distillation": {
        "training__objective": "distillation",
        "dataset__format": "prompt",
        "teacher": {"source": "Qwen/Qwen3-8B"},
    },
}


def given_to_trl(make_run: MakeRun, objective: str, **values: Any) -> dict[str, Any]:
    config = make_run(**TRL, **OBJECTIVES[objective], **values).config
    return arguments(config, Sharding("replicated", 1), 10, Path("checkpoints"))


@pytest.mark.parametrize("objective", CONFIGS)
def test_settings_are_those_of_the_installed_trl(make_run: MakeRun, objective: str) -> None:
    hints = typing.get_type_hints(CONFIGS[objective])
    names = {field.name for field in dataclasses.fields(CONFIGS[objective])}
    assert not settings.ELSEWHERE.keys() & settings.SETTINGS[objective].keys()
    for name, wanted in settings.SETTINGS[objective].items():
        kind = {tuple: str, list: list, dict: dict}.get(type(wanted), wanted)
        types = (hints[name], *typing.get_args(hints[name]))
        assert kind in {typing.get_origin(each) or each for each in types}, name
    given = given_to_trl(make_run, objective)
    assert not given.keys() - names and not given.keys() & settings.SETTINGS[objective].keys()


def test_the_pages_show_what_is_accepted_and_name_every_setting() -> None:
    shown = [yaml.safe_load(text) for page in ("engines", "methods") for text in blocks(f"docs/{page}.md", "yaml")]
    of_trl = [values for values in shown if values.get("engine") == "trl"]
    assert [values.get("training", {}).get("objective", "sft") for values in of_trl] == [
        *("sft", "kto", "reward", "grpo", "distillation", "sft"),
    ]
    for values in of_trl:
        values["dataset"] = {"source": "tatsu-lab/alpaca", "format": "alpaca"} | values.get("dataset", {})
        validate({"name": "shown", "model": {"source": "Qwen/Qwen3-8B"}} | values, "docs")
        settings.check(values.get("training", {}).get("objective", "sft"), values.get("trl", {}))
    page = (ROOT / "docs/run-file.md").read_text(encoding="utf-8").partition("## `trl`")[2].partition("\n## ")[0]
    assert not {name for known in settings.SETTINGS.values() for name in known if f"`{name}`" not in page}


@pytest.mark.parametrize("objective", CONFIGS)
def test_trl_leaves_the_dropout_of_adapters_on(make_run: MakeRun, objective: str) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(CONFIGS[objective])}
    given = defaults | given_to_trl(make_run, objective, lora__dropout=0.1)
    assert not given.get("disable_dropout")


@pytest.mark.parametrize(
    ("objective", "trl", "checked"),
    [
        ("sft", {}, True),
        ("dpo", {"loss_type": ["apo_zero"]}, True),
        ("dpo", {"loss_type": ["sigmoid", "ipo"]}, False),
        ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [30, 1]}, False),
        ("kto", {}, False),
        ("grpo", {}, False),
        ("rloo", {}, False),
        ("distillation", {}, False),
    ],
)
def test_losses_on_another_scale_are_not_compared_with_guessing(
    make_run: MakeRun, objective: str, trl: dict[str, Any], checked: bool
) -> None:
    config = make_run(**TRL, **OBJECTIVES[objective], trl=trl).config
    checkpoints: Any = SimpleNamespace(task=SimpleNamespace(config=config), ranks=SimpleNamespace(is_rank_0=False))
    log: Any = SimpleNamespace(
        advance=lambda progress, loss, _: replace(progress, step=1, first_loss=loss, smoothed_loss=loss)
    )
    state: Any = SimpleNamespace(log_history=[], global_step=1, max_steps=100)
    trainer: Any = None
    follower = StepsFollower(checkpoints, TrainingProgress(), vocabulary=128)
    follower.follow(trainer, log, None, [])
    with pytest.raises(UserError, match="step 1: the base") if checked else nullcontext():
        follower.on_log(trainer, state, TrainerControl(), logs={"loss": 25.0, "grad_norm": 1.0})


def test_settings_elsewhere_are_settings_of_trl() -> None:
    known = {field.name for config in CONFIGS.values() for field in dataclasses.fields(config)}
    assert not settings.ELSEWHERE.keys() - known


def test_optimizers_are_those_that_need_no_package() -> None:
    assert set(settings.SETTINGS["sft"]["optim"]) <= {name.value for name in OptimizerNames}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"neftune_noise_alpa": 5}, "'neftune_noise_alpa' .* did you mean neftune_noise_alpha"),
        ({"push_to_hub": True}, "'push_to_hub' is not one of the settings"),
        ({"learning_rate": 1e-4}, "set training.learning_rate instead"),
        ({"lr_scheduler_type": "cosine"}, "set training.schedule instead"),
        ({"loss_type": "dpo"}, "loss_type is 'dpo'; set it to one of nll, dft"),
        ({"neftune_noise_alpha": "5"}, "neftune_noise_alpha is '5', not of type float"),
        ({"torch_empty_cache_steps": True}, "not of type int"),
        ({"model_init_kwargs": {"dtype": "float16"}}, "'dtype' is not one of .* they are attn_implementation"),
        ({"model_init_kwargs": {"attn_implementation": "flash"}}, "one of eager, sdpa, flex_attention"),
    ],
)
def test_settings_are_checked_before_anything_runs(tmp_path: Path, given: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=f"^trl: .*{says}"):
        degrees_of(load(tmp_path, **TRL, trl=given))
    assert load(tmp_path, **TRL, trl={"neftune_noise_alpha": 5, "optim": "adafactor"}).trl["optim"] == "adafactor"
    assert "trl: has no effect with engine torch" in refused(tmp_path, trl=given)
    assert "adam_epsilon is inf; set it to a finite" in refused(tmp_path, "trl.adam_epsilon=1e999", **TRL)


def test_losses_of_preferences_are_checked(tmp_path: Path) -> None:
    dpo = TRL | OBJECTIVES["dpo"]
    assert "dataset.packing: engine trl needs one pair a row" in refused(tmp_path, **dpo | {"dataset__packing": "auto"})
    assert "dpo.label_smoothing: only engine torch" in refused(tmp_path, **dpo, dpo__label_smoothing=0.1)
    assert "loss_type is 'dft'; set it to one of sigmoid" in refused(
        tmp_path, **dpo, trl={"loss_type": ["sigmoid", "dft"]}
    )
    losses = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}
    assert "loss_weights has 1 numbers for 2 losses" in refused(tmp_path, **dpo, trl=losses)
    assert "loss_weights is 'a', not of type float" in refused(tmp_path, **dpo, trl=losses | {"loss_weights": ["a", 1]})
    assert "loss_type is empty" in refused(tmp_path, **dpo, trl={"loss_type": []})
    for name, value in (("f_divergence_type", "forward_kl"), ("use_weighting", True)):
        aot = {"loss_type": ["sigmoid", "aot"], name: value}
        assert f"TRL has no {name} for loss_type aot" in refused(tmp_path, **dpo, trl=aot)
        assert load(tmp_path, **dpo, trl=aot | {"loss_type": ["sigmoid", "ipo"]}).trl
    assert load(tmp_path, **dpo, trl=losses | {"loss_weights": [1.0, 0.5]}).trl


def test_labels_and_what_they_need_go_together(tmp_path: Path) -> None:
    kto = TRL | OBJECTIVES["kto"]
    assert load(tmp_path, **kto, kto={"desirable_weight": 1.3}).kto.undesirable_weight == 1.0
    together = "objective kto and format unpaired-preference go together"
    for key in ("training__objective", "dataset__format"):
        assert together in refused(tmp_path, **{name: value for name, value in kto.items() if name != key})
    assert "kto: has no effect without training.objective kto" in refused(tmp_path, **TRL, kto={"beta": 0.2})
    assert "training.objective: engine torch has no kto; set engine: trl" in refused(
        tmp_path, **OBJECTIVES["kto"], engine="torch"
    )
    assert "dataset.packing: bfd is not possible with objective kto" in refused(tmp_path, **kto, dataset__packing="bfd")
    assert "dataset.loss_on: " in refused(tmp_path, **kto, dataset__loss_on="all")
    alone = kto | {"training__micro_batch_size": 1}
    assert "training.micro_batch_size: objective kto needs several rows" in refused(tmp_path, **alone)
    assert load(tmp_path, **alone, trl={"loss_type": "apo_zero_unpaired"}).trl
    for name, key in (("beta", "kto.beta"), ("desirable_weight", "kto.desirable_weight")):
        assert f"trl: {name} is {key} in a run file" in refused(tmp_path, **kto, trl={name: 0.5})
    sharded = kto | {"parallelism__sharding": "zero3"}
    assert "parallelism.sharding: zero3: in bf16, TRL's KTO fails" in refused(tmp_path, **sharded)
    assert load(tmp_path, **sharded, training__precision="fp32").parallelism.sharding == "zero3"


def test_a_reward_model_has_nothing_that_writes_answers(tmp_path: Path) -> None:
    reward = TRL | OBJECTIVES["reward"]
    plan = Run.of(load(tmp_path, **reward, trl={"center_rewards_coefficient": 0.01})).plan
    assert "generate" not in plan and plan.model_stage == "merge"
    for key, value in (("generate", {"train_samples": 1}), ("deploy", {"instance_type": "g6.2xlarge"})):
        assert f"{key}: a reward model writes no answers" in refused(tmp_path, **reward, **{key: value})
    assert "lora.modules_to_save: " in refused(tmp_path, **reward, lora__modules_to_save=["lm_head"])
    assert "dataset.packing: bfd is not possible" in refused(tmp_path, **reward, dataset__packing="bfd")
    assert "training.objective: engine torch has no reward" in refused(tmp_path, **reward | {"engine": "torch"})
    assert "objective reward and format preference go together" in refused(
        tmp_path, **TRL, training__objective="reward"
    )


def test_models_with_scores_are_refused_for_other_objectives(make_run: MakeRun) -> None:
    config = make_run(**TRL, **OBJECTIVES["reward"]).config
    scores = LLAMA_3_8B | {"architectures": ["LlamaForSequenceClassification"]}
    assert check_trainable(config, degrees_of(config), scores)
    config = make_run(**TRL).config
    with pytest.raises(UserError, match="is a reward model"):
        check_trainable(config, degrees_of(config), scores)


def test_settings_of_generation_replace_no_others(tmp_path: Path) -> None:
    def said(given: dict[str, Any]) -> str:
        return refused(tmp_path, **TRL, **OBJECTIVES["grpo"], trl={"generation_kwargs": given})

    assert "generation_kwargs: temperature is sampling.temperature" in said({"temperature": 2.0})
    for name in ("max_new_tokens", "num_return_sequences", "top_p"):
        assert f"generation_kwargs: '{name}' is not one of the settings" in said({name: 1})
    assert "generation_kwargs: typical_p is '0.9', not of type float" in said({"typical_p": "0.9"})
    assert load(tmp_path, **TRL, **OBJECTIVES["grpo"], trl={"generation_kwargs": {"typical_p": 0.9}}).trl


def test_attention_takes_what_autocast_gives_it(make_run: MakeRun) -> None:
    """Flex attention needs one dtype, and a trained embedding makes fp32 of queries and keys, but not of values."""
    full, whole = {"training__method": "full"}, {"lora__modules_to_save": ["embed_tokens"]}
    for given, expected in (
        ({}, "flex_attention"),
        (full, "sdpa"),
        (whole, "sdpa"),
        (full | {"training__precision": "fp32"}, "flex_attention"),
        ({"cluster__instance_type": "local"}, "eager"),
        ({"trl": {"model_init_kwargs": {"attn_implementation": "flash_attention_2"}}}, "flash_attention_2"),
    ):
        assert settings.attention(make_run(**TRL | given).config) == expected
    config = make_run(**TRL | full).config
    shape = replace(shape_of(LLAMA_3_8B), softcap=True)
    with pytest.raises(UserError, match="sdpa leaves out the soft cap or the sinks"):
        limits.check_shape(config, degrees_of(config), shape)


def test_attention_kernels_are_looked_for_before_training(make_run: MakeRun) -> None:
    flash = {"model_init_kwargs": {"attn_implementation": "flash_attention_2"}}
    assert rules.imports(make_run(**TRL, trl=flash).config) == ("trl", "flash_attn")
    assert rules.imports(make_run(**TRL).config) == ("trl",)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("cluster__instance_type", "trn2.48xlarge", "set engine: torch or neuron"),
        ("parallelism__tensor_parallel", 2, "only engine torch supports it on GPUs"),
        ("parallelism__pipeline_parallel", 2, "only engine torch"),
        ("parallelism__context_parallel", 2, "only engine torch"),
        ("parallelism__expert_parallel", 2, "only engine torch"),
        ("parallelism__sharding", "zero1", "accelerate, with which TRL shards, has no zero1"),
        ("training__optimizer_state", "int8", "only engine torch"),
        ("training__memory_checkpoint_every_steps", 10, "only engine torch"),
        ("training__compile", True, "set trl.torch_compile"),
        ("lora__quantization", "nf4", "only engine torch"),
        ("model__adapter", {"source": "any/adapter"}, "only engine torch supports it; leave it out"),
        ("lora__target_modules", ["q_proj", "lm_head"], "TRL does not train an adapter of lm_head"),
        ("dataset__max_target_length", 16, "only engine torch trains encoder-decoders"),
        ("lora__image_tower", True, "has no effect without dataset.images"),
    ],
)
def test_what_trl_has_not_is_refused_in_one_line(tmp_path: Path, key: str, value: Any, says: str) -> None:
    said = refused(tmp_path, **TRL | {key: value})
    assert f"{key.replace('__', '.')}: " in said and says in said and len(said.splitlines()) == 1, said


def test_models_that_are_not_causal_or_ask_for_another_loss_are_refused(make_run: MakeRun) -> None:
    """Whether TRL trains others of transformers' types, stage certify finds out."""
    config = make_run(**TRL).config
    for family in ("bert", "t5"):
        with pytest.raises(UserError, match=f"models of type '{family}' are not causal language models"):
            check_trainable(config, degrees_of(config), {"model_type": family, "is_encoder_decoder": family == "t5"})
    with pytest.raises(UserError, match="asks for the router's load-balancing loss"):
        check_trainable(config, degrees_of(config), QWEN3_MOE | {"output_router_logits": True})


def test_of_mixtures_memory_is_not_known_and_ranks_shard_them(make_run: MakeRun, tmp_path: Path) -> None:
    config = make_run(**TRL).config
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE))
    fit = check_model_directory(config, degrees_of(config), tmp_path, Certificate())
    assert fit.memory is None and fit.unknown == "it is not known for qwen3_moe models with engine trl"
    assert fit.sharding == "zero3 over 8 ranks"
    full = make_run(**TRL, training__method="full").config
    refused = Certificate(not_sharded="what its ranks save could not be consolidated")
    with pytest.raises(
        UserError, match=r"^parallelism\.sharding: zero3 over 8 ranks is not possible .*consolidated"
    ) as error:
        check_model_directory(full, degrees_of(full), tmp_path, refused)
    assert error.value.remedy.startswith("set it to replicated, or ")
    replicated = make_run(**TRL, training__method="full", parallelism__sharding="replicated").config
    check_model_directory(replicated, degrees_of(replicated), tmp_path, refused)
    with pytest.raises(UserError, match=r"^parallelism\.sharding: replicated is not possible .* a\.b gets no gradient"):
        check_model_directory(replicated, degrees_of(replicated), tmp_path, Certificate(unreached="a.b"))
    with pytest.raises(UserError, match=r"zero3 over 8 ranks is not possible .* a\.b gets no gradient; set training"):
        check_model_directory(full, degrees_of(full), tmp_path, Certificate(unreached="a.b"))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (OBJECTIVES["grpo"], "training.objective: grpo: no small model"),
        ({"training__method": "full"}, "training.method: full on several ranks: no small model"),
        ({"training__method": "lora"}, ""),
        ({"training__method": "full", "parallelism__ranks_per_node": 1}, ""),
    ],
)
def test_what_only_a_small_model_proves_is_refused_without(
    make_run: MakeRun, values: dict[str, Any], says: str
) -> None:
    config = make_run(**TRL | values).config
    with pytest.raises(UserError, match=f"^{says}") if says else nullcontext():
        Certificate("no small model", "no small model").check(config, degrees_of(config))


@pytest.mark.parametrize(("attention", "rows", "refused"), [("2", 2, True), ("2", 1, False), ("", 2, False)])
def test_flash_attention_does_not_join_rows_that_would_see_one_another(
    make_run: MakeRun, attention: str, rows: int, refused: bool
) -> None:
    given = {"model_init_kwargs": {"attn_implementation": f"flash_attention_{attention}"}} if attention else {}
    config = make_run(**TRL, training__micro_batch_size=rows, trl=given).config
    with pytest.raises(UserError, match=r"^training\.micro_batch_size: flash") if refused else nullcontext():
        Certificate("documents of a row see one another").check(config, degrees_of(config))


def test_memory_counts_a_teacher(make_run: MakeRun, tmp_path: Path) -> None:
    """Once its files are here; until then, the estimate says that it is missing."""
    config = make_run(**TRL, **OBJECTIVES["distillation"]).config
    model, teacher = tmp_path / "model", tmp_path / "a-teacher"
    for directory in (model, teacher):
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(LLAMA_3_8B))
    save_file({"weight": torch.zeros(1000, 500)}, teacher / "model.safetensors")
    before, fit = (check_model_directory(config, degrees_of(config), model, teacher=each) for each in (None, teacher))
    assert "the teacher's size is known after download" in before.unknown and not fit.unknown
    assert before.memory and fit.memory and fit.memory.weights - before.memory.weights == 2 * 1000 * 500


IMAGES = TRL | {"dataset__images": True, "dataset__format": "chat"}


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("dataset__format", "dolly", "dataset.images: rows of format dolly have none"),
        ("dataset__packing", "bfd", "bfd is not possible with dataset.images; set it to none"),
        ("dataset__overlong", "truncate", "set it to drop"),
        ("dataset__loss_on", "all", "set it to completion"),
        ("dataset__reasoning", "context", "set it to train"),
        ("dataset__deduplicate", True, "true is not possible with dataset.images; set it to false"),
        ("training__method", "full", "has not been tried with dataset.images"),
        ("lora__modules_to_save", ["lm_head"], "has not been tried with dataset.images"),
        ("parallelism__sharding", "zero3", "has not been tried with dataset.images"),
        ("engine", "torch", "dataset.images: engine torch trains on text only"),
        ("deploy", {"instance_type": "g6.2xlarge"}, "deploy: endpoints have not been tried with dataset.images"),
    ],
)
def test_what_is_not_possible_with_images_is_refused_in_one_line(
    tmp_path: Path, key: str, value: Any, says: str
) -> None:
    said = refused(tmp_path, **IMAGES | {key: value})
    assert says in said and len(said.splitlines()) == 1, said


def test_images_need_a_model_that_reads_them(make_run: MakeRun) -> None:
    config = make_run(**IMAGES).config
    for family in ("gemma3_text", "qwen3", "llava"):
        with pytest.raises(UserError, match=f"dataset.images: engine trl .* of type '{family}'"):
            check_trainable(config, degrees_of(config), LLAMA_3_8B | {"model_type": family})
    language = LLAMA_3_8B | {"model_type": "qwen3_vl_text"}
    shape = check_trainable(config, degrees_of(config), {"model_type": "qwen3_vl", "text_config": language})
    assert shape is not None and (shape.model_type, shape.layers) == ("qwen3", 32)
    adapted = make_run(**IMAGES, lora__image_tower=True).config
    with pytest.raises(UserError, match=r"lora\.image_tower: .* of type 'gemma3'"):
        check_trainable(adapted, degrees_of(adapted), {"model_type": "gemma3", "text_config": language})


def test_memory_grows_with_what_is_kept(make_run: MakeRun) -> None:
    """Full training keeps 16 bytes a parameter, and DDP and autocast 6 more; another optimizer keeps less.

    What does not fit is sharded.
    """
    whole = TRL | {"training__method": "full", "training__activation_checkpointing": "full"}
    config, parameters = make_run(**whole, parallelism__sharding="replicated").config, 8_030_261_248
    memory = estimated(config, LLAMA_3_8B)
    assert memory.weights + memory.gradients + memory.optimizer == pytest.approx(22 * parameters)
    lighter = estimated(make_run(**whole, parallelism__sharding="replicated", trl={"optim": "sgd"}).config, LLAMA_3_8B)
    assert memory.total - lighter.total == pytest.approx(8 * parameters)
    compared = OBJECTIVES["kto"] | {"dataset__max_length": config.dataset.max_length // 2}
    reference = estimated(make_run(**whole, **compared, parallelism__sharding="replicated").config, LLAMA_3_8B)
    assert reference.weights - memory.weights == pytest.approx(6 * parameters)
    sharded = estimated(make_run(**whole).config, LLAMA_3_8B)
    assert 2 * parameters < sharded.total - sharded.activations < 5 * parameters
    shape = shape_of(LLAMA_3_8B)
    assert shape is not None
    # the reference is divided by the ranks, and whole in bf16 while it computes; a teacher is whole
    compared = estimated(make_run(**whole, **OBJECTIVES["dpo"]).config, LLAMA_3_8B)
    assert compared.weights - sharded.weights == pytest.approx((4 / 8 + 2) * parameters)
    learning = make_run(**whole, **OBJECTIVES["distillation"]).config
    alone, taught = (
        rules.step_memory(learning, degrees_of(learning), replace(shape, teacher=size))[0] for size in (0, parameters)
    )
    assert taught.weights - alone.weights == pytest.approx(2 * parameters)
    # a reward model has no output matrix, which FSDP2 would gather in fp32
    scoring = estimated(make_run(**whole, **OBJECTIVES["reward"]).config, LLAMA_3_8B)
    assert sharded.weights - scoring.weights == pytest.approx((4 / 8 + 4) * 128_256 * 4096)
    for given, mode in ((whole, "zero3"), (TRL, "replicated"), (whole | {"parallelism__sharding": "zero2"}, "zero2")):
        config = make_run(**given).config
        assert rules.layout(config, degrees_of(config), shape).sharding.mode == mode
