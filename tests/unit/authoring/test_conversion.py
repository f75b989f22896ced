"""Configuration files of other tools as run files. The files here are written for these tests."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.authoring import new_run
from hyperpod_ft.authoring.conversion.convert import Supplement, convert
from hyperpod_ft.authoring.conversion.foreign_file import Conversion
from hyperpod_ft.config import run_file
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.families import default_targets
from scripts.memory_table import LLAMA_3_8B

AXOLOTL = """
base_model: ./llama
datasets:
  - path: ./birds.jsonl
    type: alpaca
    split: train
adapter: qlora
load_in_4bit: yes
lora_r: 64
lora_alpha: 16
lora_target_modules: [q_proj, v_proj]
sequence_len: 1024
sample_packing: true
train_on_inputs: true
micro_batch_size: 2
gradient_accumulation_steps: 8
num_epochs: 2
learning_rate: 1e-4
optimizer: paged_adamw_8bit
lr_scheduler: constant
warmup_steps: 10
max_grad_norm: 0
val_set_size: 0.1
eval_steps: 25
gradient_checkpointing: true
fsdp_config:
  fsdp_offload_params: true
wandb_project: birds
"""
LLAMA_FACTORY = """
stage: sft
model_name_or_path: ./llama
finetuning_type: full
dataset: birds
dataset_dir: .
template: llama3
cutoff_len: 512
packing: false
per_device_train_batch_size: 1
gradient_accumulation_steps: 4
learning_rate: 2.0e-5
num_train_epochs: 1.5
warmup_ratio: 0.05
bf16: true
deepspeed: ds.json
dataloader_drop_last: true
"""
GRPO = """
model_name_or_path: ./llama
dataset_name: ./sums.jsonl
use_peft: true
lora_target_modules: all-linear
reward_funcs: [accuracy_reward, think_format_reward, rewards.polite]
reward_weights: [1.0, 0.5, 0.1]
num_generations: 4
max_completion_length: 128
beta: 0.04
temperature: 0.9
epsilon_high: 2.8e-1
top_k: 0
loss_type: dr_grpo
scale_rewards: false
per_device_train_batch_size: 8
optim: paged_adamw_8bit
eval_steps: 10
num_iterations: 2
use_vllm: true
vllm_mode: colocate
"""
AXOLOTL_GRPO = """
base_model: ./llama
rl: grpo
trl:
  reward_funcs: [rewards.polite]
  num_generations: 4
  num_iterations: 1
  beta: 0.04
  use_vllm: true
  sync_ref_model: true
datasets:
  - path: ./sums.jsonl
adapter: lora
micro_batch_size: 8
val_set_size: 0.1
"""
TRL = """
model_name_or_path: ./llama
dataset_name: ./pairs.jsonl
use_peft: true
lora_target_modules: all-linear
beta: 0.2
max_length: 1024
max_steps: 200
save_strategy: epoch
report_to: none
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA_3_8B))
    bird = {"instruction": "Name a bird.", "input": "", "output": "A tit."}
    (tmp_path / "birds.jsonl").write_text(json.dumps(bird) + "\n")
    pair = {"prompt": "Name a bird.", "chosen": "A tit.", "rejected": "A bat."}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1 + 1 =", "solution": "2"}\n')
    (tmp_path / "rewards.py").write_text("def polite(prompt, completion, /, **columns): return 1.0\n")
    (tmp_path / "dataset_info.json").write_text(json.dumps({"birds": {"file_name": "birds.jsonl"}}))
    return tmp_path


def converted(directory: Path, text: str, instance: str = "p5.48xlarge") -> tuple[Conversion, RunConfig]:
    (directory / "other.yaml").write_text(text)
    found = convert(directory / "other.yaml", Supplement(instance), directory / "run.yaml")
    (directory / "run.yaml").write_text(found.draft.text())
    return found, run_file.load(directory / "run.yaml")


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


def test_trl_with_preferences(directory: Path) -> None:
    found, config = converted(directory, TRL)
    assert "of TRL," in found.draft.text()
    assert (config.training.objective, config.dpo.beta) == ("dpo", 0.2)
    assert (config.training.max_steps, config.training.learning_rate) == (200, 1e-6)
    assert (config.lora.dropout, config.training.micro_batch_size) == (0.05, 8)
    assert (found.changes, set(found.housekeeping)) == ({}, {"save_strategy"})
    assert "`trl dpo`" in found.draft.head[1], "its files do not say for which command they are"


def test_trl_with_rewards(directory: Path) -> None:
    found, config = converted(directory, GRPO)
    assert (config.engine, config.training.objective, config.dataset.format) == ("trl", "grpo", "prompt")
    assert found.draft.get("engine") == "auto" and "`trl grpo`" in found.draft.head[1]
    asked = config.sampling
    assert (asked.generations, asked.max_completion_length, asked.beta, asked.temperature) == (4, 128, 0.04, 0.9)
    assert config.trl == {"loss_type": "dr_grpo", "epsilon_high": 0.28, "top_k": 0, "scale_rewards": "none"}
    assert [(one.known_as, one.function_name, one.weight) for one in config.reward] == [
        ("accuracy_reward", "math_verify", 1.0),
        ("think_format_reward", "regex", 0.5),
        ("polite", "polite", 0.1),
    ]
    assert "./rewards.py:polite" in found.draft.text()
    assert (config.training.learning_rate, config.training.optimizer_state) == (1e-6, "fp32")
    assert set(found.changes) == {
        *("reward_funcs", "num_iterations", "training.validate_every_steps", "training.optimizer_state"),
    }
    assert set(found.housekeeping) == {"use_vllm", "vllm_mode"}


def test_trl_with_other_learning_from_answers(directory: Path) -> None:
    kept = "model_name_or_path: ./llama\ndataset_name: ./sums.jsonl\nuse_peft: true\nlora_target_modules: all-linear\n"
    kept += "per_device_train_batch_size: 8\ntemperature: 0.9\n"
    _, rloo = converted(directory, f"{kept}reward_funcs: accuracy_reward\nnormalize_advantages: true")
    assert (rloo.training.objective, rloo.sampling.generations, rloo.sampling.beta) == ("rloo", 2, 0.05)
    assert rloo.trl == {"normalize_advantages": True}
    unsure, grpo = converted(directory, f"{kept}reward_funcs: accuracy_reward\nnum_generations: 4")
    assert grpo.training.objective == "grpo" and "training.objective: rloo" in unsure.changes["reward_funcs"]
    _, taught = converted(directory, f"{kept}teacher_model_name_or_path: ./llama\nbeta: 0.5")
    assert taught.training.objective == "distillation" and taught.teacher
    assert (taught.teacher.source, taught.teacher.beta) == (str(directory / "llama"), 0.5)
    assert (taught.sampling.temperature, taught.sampling.max_completion_length) == (0.9, 512)


def test_axolotl_with_rewards(directory: Path) -> None:
    found, config = converted(directory, AXOLOTL_GRPO)
    assert (config.engine, config.sampling.generations, config.sampling.beta) == ("trl", 4, 0.04)
    assert [one.function_name for one in config.reward] == ["polite"] and config.dataset.validation_share == 0
    assert set(found.changes) == {"trl.sync_ref_model", "lora_target_modules"}
    assert set(found.housekeeping) == {"trl.use_vllm"}


@pytest.mark.parametrize(
    ("tool", "old", "new", "said"),
    [
        (GRPO, "rewards.polite", "org/model", "the kit has no function org/model"),
        (GRPO, "rewards.polite", "mine.polite", r"in mine.py, which is neither here .* write def polite\(prompt, "),
        (GRPO, "rewards.polite", "rewards.rude", r"defines no function rude .*write it as def rude\(prompt, "),
        (GRPO, "rewards.polite", "get_soft_overlong_punishment", r"the kit has no function get_\w+; write it in"),
        (AXOLOTL_GRPO, "./sums.jsonl", "./sums.jsonl\n    type: prompts.make", "type: is a function .* --dataset"),
        (AXOLOTL_GRPO, "  reward_funcs: [rewards.polite]\n", "", r"trl\.reward_funcs: is missing"),
    ],
)
def test_rewards_that_the_kit_cannot_ask(directory: Path, tool: str, old: str, new: str, said: str) -> None:
    assert old in tool
    with pytest.raises(UserError, match=said):
        converted(directory, tool.replace(old, new))


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
        *((AXOLOTL, key) for key in ("rl: kto", "rl: orpo", "reward_model: true", "pretraining_dataset: x")),
        *((AXOLOTL, key) for key in ("processor_type: AutoProcessor", "use_eaft: true")),
        *((LLAMA_FACTORY, key) for key in ("stage: rm", "stage: ppo", "stage: kto", "finetuning_type: oft")),
        *((LLAMA_FACTORY, key) for key in ("image_max_pixels: 9", "use_asft_loss: true")),
        (LLAMA_FACTORY, "stage: dpo\npref_loss: orpo"),
        *((TRL, key) for key in ("desirable_weight: 1.0", "cpo_alpha: 1.0", "num_ppo_epochs: 4")),
    ],
)
def test_another_objective_is_refused_before_anything_else(directory: Path, tool: str, key: str) -> None:
    lines = [line for line in tool.splitlines() if f"{line.partition(':')[0]}:" not in (*key.split(), "learning_rate:")]
    with pytest.raises(UserError, match=f"{key.splitlines()[-1].partition(':')[0]}: .*the kit has"):
        converted(directory, "\n".join([*lines, "learning_rate: fast", key]))


def test_preferences_are_for_dpo_only_where_the_file_says_so(directory: Path) -> None:
    """A file of `trl reward` has the same keys as one of `trl dpo`, and rows of KTO are no pairs."""
    with pytest.raises(UserError, match=r"no DPO settings.*add beta: 0.1"):
        converted(directory, TRL.replace("beta: 0.2\n", ""))
    (directory / "pairs.jsonl").write_text('{"prompt": "Name a bird.", "completion": "A bat.", "label": false}\n')
    with pytest.raises(UserError, match="objective"):
        converted(directory, TRL)


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


def test_dataset_info_is_found_above_the_file_or_where_the_tool_was_started(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = LLAMA_FACTORY.replace("dataset_dir: .\n", "").replace("./llama", str(directory / "llama"))
    (directory / "data").mkdir()
    for name in ("dataset_info.json", "birds.jsonl"):
        (directory / name).rename(directory / "data" / name)
    examples = directory / "examples" / "lora"
    examples.mkdir(parents=True)
    _, config = converted(examples, text)
    assert config.dataset.source == str(directory / "data" / "birds.jsonl")
    elsewhere = directory.parent / f"{directory.name}-elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(directory)
    _, config = converted(elsewhere, text)
    assert config.dataset.source == str(directory / "data" / "birds.jsonl")


def test_several_datasets_are_sources(directory: Path) -> None:
    described = {
        "birds": {"file_name": "birds.jsonl"},
        "more": {"file_name": "birds.json"},
        "hub": {"hf_hub_url": "org/rows"},
        "seen": {"file_name": "seen.json", "formatting": "openai", "columns": {"messages": "messages", "images": "i"}},
        "human": {"file_name": "human.json", "formatting": "sharegpt", "columns": {"tools": "tools"}},
        "renamed": {"file_name": "human.json", "formatting": "sharegpt", "tags": {"user_tag": "person"}},
        "pairs": {"file_name": "pairs.jsonl", "ranking": True, "columns": {"chosen": "chosen", "rejected": "rejected"}},
    }
    (directory / "dataset_info.json").write_text(json.dumps(described))
    (directory / "birds.json").write_text((directory / "birds.jsonl").read_text())

    def with_datasets(names: str, more: str = "") -> tuple[Conversion, RunConfig]:
        return converted(directory, LLAMA_FACTORY.replace("dataset: birds", f"dataset: {names}") + more)

    found, config = with_datasets("birds, more, hub", "max_samples: 10\nmix_strategy: concat\n")
    assert [part.dataset.source for part in config.dataset.parts] == [
        str(directory / "birds.jsonl"),
        str(directory / "birds.json"),
        "org/rows",
    ]
    assert [part.name for part in config.dataset.parts] == ["birds", "birds-2", "rows"]
    assert {part.dataset.split for part in config.dataset.parts} == {"train[:10]"}
    assert {part.dataset.format for part in config.dataset.parts} == {"alpaca"}
    assert not {"max_samples", "mix_strategy"} & found.changes.keys()
    found, _ = with_datasets("birds, more", "mix_strategy: interleave_under\ninterleave_probs: 0.3,0.7\n")
    assert {"mix_strategy", "interleave_probs"} <= found.changes.keys()
    for names, said in (
        ("seen", "seen has images"),
        ("renamed", "messages of role and content"),
        ("missing", "does not describe it"),
    ):
        with pytest.raises(UserError, match=said):
            with_datasets(names)
    talk = [{"from": "human", "value": "Name a bird."}, {"from": "gpt", "value": "A tit."}]
    (directory / "human.json").write_text(json.dumps([{"conversations": talk, "tools": "[]"}]))
    _, config = with_datasets("human")
    assert config.dataset.format == "chat"
    with pytest.raises(UserError, match="prompt, chosen and rejected"):
        converted(directory, LLAMA_FACTORY.replace("stage: sft", "stage: dpo").replace("birds", "pairs"))
    other = AXOLOTL.replace("adapter:", "  - path: ./more.jsonl\n    type: alpaca\nadapter:")
    (directory / "more.jsonl").write_text((directory / "birds.jsonl").read_text())
    _, config = converted(directory, other)
    assert [part.name for part in config.dataset.parts] == ["birds", "more"]
    with pytest.raises(UserError, match="type completion beside others"):
        converted(directory, other.replace("more.jsonl\n    type: alpaca", "more.jsonl\n    type: completion"))
    (directory / "other.yaml").write_text(other)
    given = Supplement("p5.48xlarge", dataset=str(directory / "birds.jsonl"))
    found = convert(directory / "other.yaml", given, directory / "run.yaml")
    assert found.draft.get("dataset.source") == "./birds.jsonl"


def test_rows_with_other_fields_than_the_kit_reads_are_refused(directory: Path) -> None:
    fields = "field_messages: conversations\n    message_property_mappings: {role: from, content: value}"
    _, config = converted(directory, AXOLOTL.replace("type: alpaca", f"type: chat_template\n    {fields}"))
    assert config.dataset.format == "chat"
    for kind, field in (("chat_template", "field_messages: talk"), ("chat_template.default", "")):
        text = AXOLOTL.replace("type: alpaca", f"type: {kind}\n    {field}") + ("" if field else "rl: dpo\n")
        with pytest.raises(UserError, match=r"datasets\[0\]\.field_messages: rows of format"):
            converted(directory, text)
    with pytest.raises(UserError, match="--format"):
        converted(directory, AXOLOTL.replace("type: alpaca", "type: oasst"))


def test_columns_that_the_named_format_lacks_are_said(directory: Path) -> None:
    row = {"instruction": "Name a bird.", "context": "", "response": "A tit."}
    (directory / "birds.jsonl").write_text(json.dumps(row) + "\n")
    head = " ".join(converted(directory, AXOLOTL)[0].draft.head)
    assert "birds.jsonl:1" in head and "missing field 'output'" in head and "will stop" in head


@pytest.mark.parametrize(
    ("tool", "old", "new", "split"),
    [
        (AXOLOTL, "split: train", "split: train[:90%]", "train[:90%]"),
        (AXOLOTL, "split: train", "split: train+test", "train"),
        (LLAMA_FACTORY, "packing:", "max_samples: 1000\npacking:", "train[:1000]"),
        (TRL, "./pairs.jsonl", "org/pairs\ndataset_train_split: train_prefs", "train_prefs"),
    ],
)
def test_the_split_is_kept_or_named(directory: Path, tool: str, old: str, new: str, split: str) -> None:
    found, config = converted(directory, tool.replace(old, new))
    assert config.dataset.split == split
    assert ("datasets[0].split" in found.changes) == ("+" in new)
