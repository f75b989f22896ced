"""Configuration files of other tools as run files. The files here are written for these tests."""

import json
import math
from pathlib import Path

import pytest

from hyperpod_ft.authoring.conversion.convert import Supplement, convert
from hyperpod_ft.authoring.conversion.foreign_file import Conversion
from hyperpod_ft.config import run_file
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
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
    assert (config.dataset.packing, config.dataset.validation_share) == ("bfd", 0.1)
    training = config.training
    assert (training.epochs, training.learning_rate, training.schedule) == (2, 1e-4, "constant")
    assert (training.micro_batch_size, training.gradient_accumulation_steps) == (2, 8)
    assert (training.optimizer_state, training.max_grad_norm, training.validate_every_steps) == ("int8", 0, 25)
    assert training.activation_checkpointing == "full"
    assert (config.tracking.trackers, config.tracking.project) == (("wandb",), "birds")
    assert set(found.left) == {"datasets[0].split", "warmup_steps", "fsdp_config"}


def test_llama_factory(directory: Path) -> None:
    found, config = converted(directory, LLAMA_FACTORY)
    assert "of LLaMA-Factory," in found.draft.text()
    assert (config.training.method, config.training.epochs) == ("full", 1.5)
    assert (config.dataset.format, config.dataset.packing, config.dataset.max_length) == ("alpaca", "none", 512)
    assert (config.training.schedule, config.training.warmup_share) == ("linear", 0.05), "transformers' default"
    assert set(found.left) == {"template", "deepspeed"}


def test_trl_with_preferences(directory: Path) -> None:
    found, config = converted(directory, TRL)
    assert "of TRL," in found.draft.text()
    assert (config.training.objective, config.dpo.beta) == ("dpo", 0.2)
    assert (config.training.max_steps, config.training.learning_rate) == (200, 1e-6)
    assert (config.lora.dropout, config.training.micro_batch_size) == (0.05, 8)
    assert set(found.left) == {"save_strategy"}


def test_every_key_is_used_or_named_and_no_secret_is_copied(directory: Path) -> None:
    extra = (
        "mystery: 3\nlerning_rate: 1\nhub_token: abc\nmodel_revision: hf_0123456789abcdef\nenv: {KEY: hf_abcdefgh12}\n"
    )
    found, _ = converted(directory, TRL + extra)
    assert found.left["mystery"] == "unknown key"
    assert "did you mean learning_rate?" in found.left["lerning_rate"]
    text = found.draft.text()
    for key in ("hub_token", "model_revision", "env"):
        assert "secret" in found.left[key]
    assert "hf_" not in text and "abc" not in text
    assert all(f"# Not converted: {key}" in text for key in found.left)


def test_names_of_keys_cannot_control_a_terminal(directory: Path) -> None:
    found, _ = converted(directory, TRL + '"a\\e[2J\\nb": 1\n')
    assert found.left["a?[2J?b"] == "unknown key"
    assert "# Not converted: a?[2J?b: unknown key" in found.draft.text()


@pytest.mark.parametrize(
    ("warmup", "share"), [("warmup_steps: 10\nwarmup_ratio: 0.5", 0.05), ("warmup_steps: 0.1", 0.1)]
)
def test_warmup_steps_are_a_share_where_the_steps_are_known(directory: Path, warmup: str, share: float) -> None:
    found, config = converted(directory, f"{TRL}{warmup}\n")
    assert config.training.warmup_share == share and "warmup_steps" not in found.left


@pytest.mark.parametrize("key", ["wandb_mode: disabled", "wandb_project: my birds"])
def test_a_project_of_weights_and_biases_that_cannot_be_used(directory: Path, key: str) -> None:
    text = AXOLOTL.replace("wandb_project: birds", key if "project" in key else f"wandb_project: birds\n{key}")
    found, config = converted(directory, text)
    assert config.tracking.project is None
    assert ("wandb_project" in found.left) == ("project" in key)


def test_weights_and_biases_that_were_offline_stay_offline(directory: Path) -> None:
    text = AXOLOTL.replace("wandb_project: birds", "wandb_project: birds\nwandb_mode: offline\nwandb_entity: me")
    found, config = converted(directory, text)
    assert config.cluster.environment == {"WANDB_MODE": "offline"}
    assert "WANDB_ENTITY" in found.left["wandb_entity"]


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
        ("model_name_or_path: ./llama\nstage: ppo\n", "stage"),
        ("base_model: ./llama\nlearning_rate: fast\n", "learning_rate: is not a number"),
        ("stage: sft\nmodel_name_or_path: ./llama\ndataset: elsewhere\n", "dataset_info.json"),
        ("- 1\n", "has no keys"),
    ],
)
def test_what_cannot_be_converted(directory: Path, text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        converted(directory, text)
