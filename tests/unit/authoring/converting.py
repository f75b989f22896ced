"""Files of other tools, written for the tests of their conversion, which share them."""

from pathlib import Path

from hyperpod_ft.authoring.conversion.convert import Supplement, convert
from hyperpod_ft.authoring.conversion.foreign_file import Conversion
from hyperpod_ft.config import run_file
from hyperpod_ft.config.run_config import RunConfig

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


def converted(
    directory: Path, text: str, instance: str = "p5.48xlarge", format: str | None = None
) -> tuple[Conversion, RunConfig]:
    (directory / "other.yaml").write_text(text)
    found = convert(directory / "other.yaml", Supplement(instance, format=format), directory / "run.yaml")
    (directory / "run.yaml").write_text(found.draft.text())
    return found, run_file.load(directory / "run.yaml")
