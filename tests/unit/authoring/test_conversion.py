"""Configuration files of other tools as run files: models, settings, and what has no counterpart."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.authoring import new_run
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.families import default_targets
from scripts.memory_table import LLAMA_3_8B
from tests.unit.authoring.converting import AXOLOTL, LLAMA_FACTORY, TRL, converted


def test_axolotl(directory: Path) -> None:
    found, config = converted(directory, AXOLOTL)
    assert "Converted from other.yaml, of axolotl," in found.draft.text()
    assert (config.lora.r, config.lora.alpha, config.lora.quantization) == (64, 16, "nf4")
    assert config.lora.target_modules == ("q_proj", "v_proj")
    assert config.dataset.source == str(directory / "birds.jsonl")
    assert (config.dataset.format, config.dataset.max_length, config.dataset.loss_on) == ("alpaca", 1024, "all")
    assert (config.dataset.packing, config.dataset.validation_share) == ("auto", 0.1)
    # axolotl drops long rows without an error
    assert config.dataset.overlong == "drop" and config.dataset.max_bad_rows > 10**6
    training = config.training
    assert (training.epochs, training.learning_rate, training.schedule) == (2, 1e-4, "constant")
    assert (training.micro_batch_size, training.gradient_accumulation_steps) == (2, 8)
    assert (training.optimizer_state, training.max_grad_norm, training.validate_every_steps) == ("int8", 0, 25)
    assert training.activation_checkpointing == "full"
    assert (config.tracking.trackers, config.tracking.project) == (("wandb",), "birds")
    assert training.warmup_share == 0, "transformers' constant schedule has none"
    assert (found.changes, set(found.housekeeping)) == ({}, {"fsdp_config"})


@pytest.mark.parametrize(("strategy", "overlong"), [("raise", "drop"), ("truncate", "truncate")])
def test_long_rows_of_axolotl(directory: Path, strategy: str, overlong: str) -> None:
    """With `raise`, stage dataset stops at the first one."""
    found, config = converted(directory, f"{AXOLOTL}excess_length_strategy: {strategy}\n")
    assert (config.dataset.overlong, config.dataset.max_bad_rows, found.changes) == (overlong, 0, {})


@pytest.mark.parametrize(
    ("text", "method"),
    [
        (
            f"{AXOLOTL}tokens: ['<tool>', '</tool>']\nspecial_tokens: {{additional_special_tokens: [<|end|>]}}\n"
            "lora_modules_to_save: [embed_tokens, lm_head]\nresize_token_embeddings_to_32x: true\n",
            "lora",
        ),
        (f"{LLAMA_FACTORY}add_tokens: <tool>, </tool>\nnew_special_tokens: <|end|>\nresize_vocab: true\n", "full"),
        (
            f"{LLAMA_FACTORY}add_tokens: <tool>,</tool>\nadd_special_tokens: <|end|>\n".replace("full", "lora"),
            "lora",
        ),
    ],
)
def test_new_tokens(directory: Path, text: str, method: str) -> None:
    found, config = converted(directory, text)
    assert config.model.new_tokens == ("<tool>", "</tool>") and config.training.method == method
    assert config.model.new_special_tokens == ("<|end|>",)
    assert config.lora.modules_to_save == (("embed_tokens", "lm_head") if method == "lora" else ())
    assert not {key for key in found.changes if "token" in key or "vocab" in key}


@pytest.mark.parametrize(
    ("more", "targets"),
    [
        ("", ("q_proj", "v_proj", "embed_tokens", "lm_head")),
        ("lora_target_modules: [q_proj, lm_head, embed_tokens]\n", ("q_proj", "lm_head", "embed_tokens")),
        ("lora_target_linear: true\n", (*default_targets("llama"), "embed_tokens", "lm_head")),
    ],
)
def test_new_tokens_of_a_tied_model(directory: Path, more: str, targets: tuple[str, ...]) -> None:
    """Its matrix is not trained whole: PEFT would train two."""
    (directory / "llama" / "config.json").write_text(json.dumps(LLAMA_3_8B | {"tie_word_embeddings": True}))
    text = AXOLOTL.replace("lora_target_modules: [q_proj, v_proj]\n", more) if more else AXOLOTL
    _, config = converted(directory, f"{text}tokens: ['<tool>']\n")
    assert config.lora.target_modules == targets and not config.lora.modules_to_save


def test_new_tokens_of_a_model_that_is_not_here(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_run, "_model_directory", lambda *_: None)
    _, config = converted(directory, AXOLOTL.replace("./llama", "some/llama") + "tokens: ['<tool>']\n")
    assert config.lora.modules_to_save == ("embed_tokens", "lm_head")


def test_modules_that_the_kit_does_not_train_whole(directory: Path) -> None:
    found, config = converted(directory, f"{AXOLOTL}lora_modules_to_save: [embed_tokens, norm]\n")
    assert set(found.changes) == {"lora_modules_to_save"} and not config.lora.modules_to_save


def test_llama_factory(directory: Path) -> None:
    found, config = converted(directory, LLAMA_FACTORY)
    assert "of LLaMA-Factory," in found.draft.text()
    assert (config.training.method, config.training.epochs) == ("full", 1.5)
    assert (config.dataset.format, config.dataset.packing, config.dataset.max_length) == ("alpaca", "none", 512)
    assert (config.training.schedule, config.training.warmup_share) == ("linear", 0.05), "transformers' default"
    assert (set(found.changes), set(found.housekeeping)) == ({"template", "dataloader_drop_last"}, {"deepspeed"})


@pytest.mark.parametrize(
    ("tool", "more", "settings"),
    [
        (AXOLOTL, "neftune_noise_alpha: 5", {"neftune_noise_alpha": 5}),
        (LLAMA_FACTORY, "use_dft_loss: true", {"loss_type": "dft"}),
        (TRL, "loss_type: ipo", {"loss_type": ["ipo"]}),
        (
            TRL,
            "loss_type: [sigmoid, sft]\nloss_weights: [1.0, 2.0]\nlabel_smoothing: 0.1",
            {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 2.0]},
        ),
        (TRL, "loss_type: sigmoid", {}),
    ],
)
def test_what_only_engine_trl_has(directory: Path, tool: str, more: str, settings: dict[str, Any]) -> None:
    """Then what only engine torch has is left out, and named."""
    found, config = converted(directory, f"{tool}{more}\n")
    assert (config.trl, config.engine) == (settings, "trl" if settings else "torch")
    assert ("dpo.label_smoothing" in found.changes) == ("label_smoothing" in more)
    assert ("lora.quantization" in found.changes) == (tool == AXOLOTL)


def test_on_trainium_what_only_engine_trl_has_is_named(directory: Path) -> None:
    found, config = converted(directory, f"{LLAMA_FACTORY}neftune_noise_alpha: 5\n", "trn1.32xlarge")
    assert config.engine == "neuron" and not config.trl
    assert "only engine trl has it" in found.changes["trl.neftune_noise_alpha"]


def test_every_key_is_used_or_named_and_no_secret_is_copied(directory: Path) -> None:
    extra = (
        "mystery: 3\nlerning_rate: 1\nhub_token: abc\nmodel_revision: hf_0123456789abcdef\n"
        "env: {KEY: hf_abcdefgh12345678}\neos_token: <|end|>\n"
        "wandb_log_level: 3\ntf32: true\nmaybe_on_by_default: false\nnothing:\n"
    )
    found, _ = converted(directory, TRL + extra)
    text = found.draft.text()
    assert set(found.changes) == {"mystery", "lerning_rate", "maybe_on_by_default", "eos_token"}, "may matter"
    assert "did you mean learning_rate?" in found.changes["lerning_rate"]
    for key in ("hub_token", "model_revision", "env"):
        assert "secret" in found.housekeeping[key]
    assert "hf_" not in text and "abc" not in text
    assert text.index("# mystery") < text.index("# Housekeeping") < text.index("wandb_log_level")


def test_names_of_keys_cannot_control_a_terminal(directory: Path) -> None:
    found, _ = converted(directory, TRL + '"a\\e[2J\\nb": 1\n')
    assert "# a?[2J?b: unknown key" in found.draft.text()


@pytest.mark.parametrize(
    ("warmup", "share"), [("warmup_steps: 10\nwarmup_ratio: 0.5", 0.05), ("warmup_steps: 0.1", 0.1)]
)
def test_warmup_steps_are_a_share_where_the_steps_are_known(directory: Path, warmup: str, share: float) -> None:
    found, config = converted(directory, f"{TRL}{warmup}\n")
    assert config.training.warmup_share == share and "warmup_steps" not in found.changes


@pytest.mark.parametrize("key", ["wandb_mode: disabled", "wandb_project: my birds"])
def test_a_project_of_weights_and_biases_that_cannot_be_used(directory: Path, key: str) -> None:
    text = AXOLOTL.replace("wandb_project: birds", key if "project" in key else f"wandb_project: birds\n{key}")
    found, config = converted(directory, text)
    assert config.tracking.project is None
    assert ("wandb_project" in found.housekeeping) == ("project" in key)


def test_weights_and_biases_that_were_offline_stay_offline(directory: Path) -> None:
    text = AXOLOTL.replace("wandb_project: birds", "wandb_project: birds\nwandb_mode: offline")
    _, config = converted(directory, text)
    assert config.cluster.environment == {"WANDB_MODE": "offline"}


def test_warmup_steps_are_the_same_number_of_steps(directory: Path) -> None:
    _, config = converted(directory, TRL.replace("max_steps: 200", "max_steps: 300") + "warmup_steps: 50\n")
    assert config.training.max_steps == 300
    assert math.ceil(config.training.warmup_share * 300) == 50


def test_the_batch_stays_and_is_divided_only_to_fit(directory: Path) -> None:
    large = AXOLOTL.replace("micro_batch_size: 2", "micro_batch_size: 32").replace("packing: true", "packing: false")
    _, config = converted(directory, large, "g5.xlarge")
    training = config.training
    assert training.micro_batch_size < 32
    assert training.micro_batch_size * training.gradient_accumulation_steps == 32 * 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learning_rate: 1\n", "has none of the keys"),
        ("base_model: ./llama\n", "dataset"),
        ("base_model: ./llama\nlearning_rate: fast\n", "learning_rate: is not a number"),
        ("stage: sft\nmodel_name_or_path: ./llama\ndataset: elsewhere\n", "dataset_info.json"),
        ("- 1\n", "has no keys"),
    ],
)
def test_what_cannot_be_converted(directory: Path, text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        converted(directory, text)


@pytest.mark.parametrize(
    ("tool", "key"),
    [
        *((AXOLOTL, key) for key in ("rl: orpo", "process_reward_model: true", "pretraining_dataset: x")),
        *((AXOLOTL, key) for key in ("use_eaft: true", "diffusion: true")),
        *((LLAMA_FACTORY, key) for key in ("stage: ppo", "finetuning_type: oft")),
        *((LLAMA_FACTORY, key) for key in ("use_asft_loss: true", "use_eaft_loss: true")),
        (LLAMA_FACTORY, "stage: dpo\npref_loss: orpo"),
        *((TRL, key) for key in ("cpo_alpha: 1.0", "num_ppo_epochs: 4")),
    ],
)
def test_another_objective_is_refused_before_anything_else(directory: Path, tool: str, key: str) -> None:
    lines = [line for line in tool.splitlines() if f"{line.partition(':')[0]}:" not in (*key.split(), "learning_rate:")]
    with pytest.raises(UserError, match=f"{key.splitlines()[-1].partition(':')[0]}: .*the kit has"):
        converted(directory, "\n".join([*lines, "learning_rate: fast", key]))


@pytest.mark.parametrize(
    ("tool", "key", "schedule"),
    [
        (AXOLOTL, "lr_scheduler", "cosine"),
        (LLAMA_FACTORY, "lr_scheduler_type", "cosine"),
        (TRL, "lr_scheduler_type", "cosine"),
    ],
)
def test_a_value_without_counterpart_is_named(directory: Path, tool: str, key: str, schedule: str) -> None:
    optimizer = "optimizer" if tool == AXOLOTL else "optim"
    without = "\n".join(line for line in tool.splitlines() if line.partition(":")[0] not in (key, optimizer))
    found, config = converted(directory, f"{without}\n{key}: cosine_with_min_lr\n{optimizer}: muon\n")
    assert config.training.schedule == schedule
    assert {key, optimizer} <= found.changes.keys()


@pytest.mark.parametrize(
    ("tool", "key"),
    [(AXOLOTL, "lora_target_modules"), (LLAMA_FACTORY, "lora_target"), (TRL, "lora_target_modules")],
)
def test_a_regular_expression_is_no_name_of_a_module(directory: Path, tool: str, key: str) -> None:
    without = "\n".join(line for line in tool.splitlines() if line.partition(":")[0] not in (key, "finetuning_type"))
    found, config = converted(directory, without + f"\n{key}: 'model.layers.[\\d]+.mlp.(up|down)_proj'\n")
    assert config.lora.target_modules is None and "regular expression" in found.changes[key]


@pytest.mark.parametrize("tool", [AXOLOTL, TRL])
def test_parameters_of_experts_keep_their_names(directory: Path, tool: str) -> None:
    (directory / "llama" / "config.json").write_text(json.dumps(LLAMA_3_8B | {"model_type": "qwen3_moe"}))
    without = "\n".join(line for line in tool.splitlines() if line.partition(":")[0] not in ("load_in_4bit", "adapter"))
    text = f"{without}\nadapter: lora\nlora_dropout: 0\nlora_target_parameters: [mlp.experts.down_proj]\n"
    _, config = converted(directory, text)
    assert config.lora.target_parameters == ("mlp.experts.down_proj",)
