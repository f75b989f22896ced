"""Files of other tools for objectives that learn from sampled answers."""

from pathlib import Path

import pytest

from hyperpod_ft.errors import UserError
from tests.unit.authoring.converting import converted

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
