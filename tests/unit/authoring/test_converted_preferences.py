"""Files of other tools for DPO, KTO and reward models."""

from pathlib import Path

import pytest

from hyperpod_ft.errors import UserError
from tests.unit.authoring.converting import LLAMA_FACTORY, TRL, converted


def test_trl_with_preferences(directory: Path) -> None:
    found, config = converted(directory, TRL)
    assert "of TRL," in found.draft.text()
    assert (config.training.objective, config.dpo.beta) == ("dpo", 0.2)
    assert (config.training.max_steps, config.training.learning_rate) == (200, 1e-6)
    assert (config.lora.dropout, config.training.micro_batch_size) == (0.0, 8), "disable_dropout"
    assert (found.changes, set(found.housekeeping)) == ({}, {"save_strategy"})
    assert "`trl dpo`" in found.draft.head[1], "its files do not say for which command they are"
    found, config = converted(directory, f"{TRL}disable_dropout: false\n")
    assert (config.lora.dropout, found.changes) == (0.05, {})
    found, _ = converted(directory, f"{TRL}disable_dropout: false\nlora_dropout: 0\n")
    assert set(found.changes) == {"disable_dropout"}
    _, config = converted(directory, f"{TRL}disable_dropout: true\nlora_dropout: 0.1\n")
    assert config.lora.dropout == 0


def test_what_preferences_are_for_the_file_says_or_its_rows(directory: Path) -> None:
    """A file of `trl reward` may have no key that one of `trl sft` lacks, and one of `trl kto` none beside DPO's."""
    unsaid = TRL.replace("beta: 0.2\n", "")
    with pytest.raises(UserError, match=r"does not say what it trains.*add beta: 0.1.*lora_task_type: SEQ_CLS"):
        converted(directory, unsaid)
    _, config = converted(directory, f"{unsaid}lora_task_type: SEQ_CLS\n")
    assert (config.engine, config.training.objective, config.training.learning_rate) == ("trl", "reward", 1e-4)
    _, config = converted(directory, TRL.replace("pairs", "feedback"))
    assert (config.training.objective, config.dataset.format, config.kto.beta) == ("kto", "unpaired-preference", 0.2)
    elsewhere = TRL.replace("./pairs.jsonl", "org/rows")
    found, config = converted(directory, elsewhere)
    assert config.training.objective == "dpo" and "--format unpaired-preference" in found.changes["beta"]
    found, config = converted(directory, elsewhere, format="unpaired-preference")
    assert config.training.objective == "kto" and not found.changes
    found, config = converted(directory, f"{elsewhere}loss_type: ipo\n")
    assert config.training.objective == "dpo" and not found.changes
    with pytest.raises(UserError, match="loss_type: is for `trl dpo`, and the rows are those of `trl kto`"):
        converted(directory, TRL.replace("pairs", "feedback") + "loss_type: ipo\n")
    _, config = converted(directory, unsaid.replace("pairs", "birds") + "loss_type: []\n")
    assert config.training.objective == "sft"


KTO_OF_AXOLOTL = """
base_model: ./llama
rl: kto
rl_beta: 0.5
kto_desirable_weight: 0.2
datasets:
  - path: ./feedback.jsonl
    type: llama3.ultra
adapter: lora
lora_target_linear: true
micro_batch_size: 1
gradient_accumulation_steps: 8
remove_unused_columns: false
"""
KTO_OF_LLAMA_FACTORY = """
stage: kto
model_name_or_path: ./llama
dataset: feedback
dataset_dir: .
template: llama3
pref_beta: 0.5
kto_chosen_weight: 0.2
dpo_label_smoothing: 0.1
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
"""
KTO_OF_TRL = """
model_name_or_path: ./llama
dataset_name: ./feedback.jsonl
use_peft: true
lora_target_modules: all-linear
beta: 0.5
desirable_weight: 0.2
loss_type: kto
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
"""


@pytest.mark.parametrize(
    ("text", "changes", "unused"),
    [
        (KTO_OF_AXOLOTL, {"micro_batch_size", "datasets[0].type"}, set()),
        (KTO_OF_LLAMA_FACTORY, {"per_device_train_batch_size", "template"}, {"dpo_label_smoothing"}),
        (KTO_OF_TRL, {"per_device_train_batch_size"}, set()),
    ],
)
def test_kto(directory: Path, text: str, changes: set[str], unused: set[str]) -> None:
    """It compares the rows of a forward pass, as many as before in a step."""
    found, config = converted(directory, text)
    assert (config.engine, config.training.objective, config.training.method) == ("trl", "kto", "lora")
    assert (config.kto.beta, config.kto.desirable_weight, config.kto.undesirable_weight) == (0.5, 0.2, 1.0)
    assert (config.dataset.format, config.dataset.packing) == ("unpaired-preference", "none") and not config.trl
    assert (config.training.micro_batch_size, config.training.gradient_accumulation_steps) == (2, 4)
    assert (set(found.changes), set(found.housekeeping)) == (changes, unused)


def test_the_rows_that_kto_compares(directory: Path) -> None:
    odd = KTO_OF_TRL.replace("steps: 8", "steps: 7")
    found, config = converted(directory, odd)
    assert (config.training.micro_batch_size, config.training.gradient_accumulation_steps) == (2, 4)
    assert "a step has 8 rows of each device" in found.changes["per_device_train_batch_size"]
    found, config = converted(directory, odd.replace("loss_type: kto", "loss_type: apo_zero_unpaired"))
    assert (config.training.micro_batch_size, config.training.gradient_accumulation_steps) == (1, 7)
    assert not found.changes
    with pytest.raises(UserError, match="GiB"):  # and not that a forward pass of one row is too small
        converted(directory, KTO_OF_TRL.replace("use_peft: true", ""), "g5.xlarge")


REWARD_OF_AXOLOTL = """
base_model: ./llama
model_type: AutoModelForSequenceClassification
num_labels: 1
reward_model: true
center_rewards_coefficient: 0.01
datasets:
  - path: ./pairs.jsonl
    type: {field_prompt: prompt, chosen_format: "{chosen}"}
rl_beta: 0.1
"""
REWARD_OF_LLAMA_FACTORY = LLAMA_FACTORY.replace("stage: sft", "stage: rm").replace("dataset: birds", "dataset: pairs")


@pytest.mark.parametrize(
    ("text", "settings", "changes", "unused"),
    [
        (REWARD_OF_AXOLOTL, {"center_rewards_coefficient": 0.01}, set(), {"rl_beta"}),
        (REWARD_OF_LLAMA_FACTORY, {}, {"template", "dataloader_drop_last"}, {"deepspeed"}),
        (
            TRL.replace("beta: 0.2", "center_rewards_coefficient: 0.01"),
            {"center_rewards_coefficient": 0.01},
            set(),
            {"save_strategy"},
        ),
    ],
)
def test_reward_models(
    directory: Path, text: str, settings: dict[str, float], changes: set[str], unused: set[str]
) -> None:
    found, config = converted(directory, text)
    assert (config.engine, config.training.objective, config.dataset.format) == ("trl", "reward", "preference")
    assert (config.trl, config.dataset.packing) == (settings, "none")
    assert (set(found.changes), set(found.housekeeping)) == (changes, unused)


@pytest.mark.parametrize(
    ("text", "old", "new", "said"),
    [
        (KTO_OF_AXOLOTL, "llama3.ultra", "llama3.intel", r"datasets\[0\]\.type: is not one of .* --format"),
        (KTO_OF_AXOLOTL, "llama3.ultra", "{field_label: good}", r"datasets\[0\]\.type: is not one of .* --format"),
        (KTO_OF_LLAMA_FACTORY, "dataset: feedback", "dataset: talks", "than prompt, completion and label; convert"),
        (
            REWARD_OF_AXOLOTL,
            '{field_prompt: prompt, chosen_format: "{chosen}"}',
            "bradley_terry.chat_template",
            "input",
        ),
    ],
)
def test_preferences_with_other_fields_are_refused(directory: Path, text: str, old: str, new: str, said: str) -> None:
    assert old in text
    with pytest.raises(UserError, match=said):
        converted(directory, text.replace(old, new))
