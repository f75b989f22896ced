"""Stages consolidate and merge on a run directory: which checkpoint they take, what they leave, what the card says."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from hyperpod_ft.checkpoint.sharded.sharded import open_checkpoint
from hyperpod_ft.config import yaml_text
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.records import Record, utc_now
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import consolidate, merge
from tests.unit import tiny_checkpoints
from tests.unit.tiny_checkpoints import add_checkpoint, run_on

IDS = torch.arange(12).reshape(2, 6)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.base_model(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def trained(base: Path) -> dict[str, torch.Tensor]:
    return tiny_checkpoints.trainable(tiny_checkpoints.peft_model(base))


def record_training(run: Run, steps: int) -> None:
    record(run, "train", {"steps": steps, "final_loss": 0.123456789, "epochs": 2.0, "tokens": 4096})


def record(run: Run, stage: str, facts: dict[str, Any]) -> None:
    fingerprint = run.plan[stage].fingerprint
    Record(stage, fingerprint, {}, (), facts, utc_now(), 0.0, "", "").write(run.paths.record_path(stage))


def test_from_checkpoint_to_merged_model(base: Path, trained: dict[str, torch.Tensor], tmp_path: Path) -> None:
    run = run_on(tmp_path, base, merge={"max_shard_size_gb": 5e-5}, generate={"prompts": ["```\n---\n```"]})
    add_checkpoint(run, {name: torch.zeros_like(value) for name, value in trained.items()}, step=4)
    add_checkpoint(run, trained, step=12)
    record_training(run, 12)
    done = consolidate.work(run)
    assert done.outputs == (run.paths.adapter,) and done.facts["checkpoint"] == "step-00000012"
    taught = "writes a question as rows of format prompt-completion"
    assert done.facts["chat_template"] == taught
    record(run, "consolidate", done.facts)
    done = merge.work(run)
    assert done.outputs == (run.paths.tuned_model,)
    assert done.facts["merged"] == 14 and done.facts["tensors"] == 21 and done.facts["shards"] > 1
    assert done.facts["lost_in_rounding"] == 0

    live = tiny_checkpoints.peft_model(base)
    merged = AutoModelForCausalLM.from_pretrained(run.paths.tuned_model).eval()
    with torch.inference_mode():
        torch.testing.assert_close(merged(IDS).logits, live(IDS).logits, rtol=1e-5, atol=1e-5)

    text = (run.paths.tuned_model / "README.md").read_text()
    card = ModelCard(text)
    assert card.data.base_model == "tiny" and card.data.library_name == "transformers"
    assert card.data.tags == ["hyperpod-ft", "sft", "lora"]
    assert f"| chat template | {taught} |" in text
    asked = AutoTokenizer.from_pretrained(run.paths.tuned_model).apply_chat_template(
        [{"role": "user", "content": "the prompt"}], add_generation_prompt=True, tokenize=False
    )
    assert asked == "<s>the prompt"
    assert run.config.model.asset.revision in text and "| final training loss | 0.123457 |" in text
    fence = "````"
    assert text.count(fence) == 2
    assert text.split(fence)[1].removeprefix("yaml\n") == yaml_text.dump(run.config)
    assert yaml.safe_load(yaml_text.dump(run.config))["name"] == "tiny"


@pytest.mark.parametrize(("dtype", "written"), [("base", torch.float32), ("bfloat16", torch.bfloat16)])
def test_method_full_consolidates_into_the_final_model(
    base: Path, tmp_path: Path, dtype: str, written: torch.dtype
) -> None:
    run = run_on(tmp_path, base, training={"method": "full"}, merge={"dtype": dtype})
    model = AutoModelForCausalLM.from_pretrained(base)
    add_checkpoint(run, {name: value + 0.01 for name, value in tiny_checkpoints.trainable(model).items()})
    assert consolidate.work(run).outputs == (run.paths.tuned_model,)
    tuned = AutoModelForCausalLM.from_pretrained(run.paths.tuned_model, dtype="auto")
    assert {value.dtype for value in tuned.state_dict().values()} == {tuned.config.dtype} == {written}
    assert "set chat_prompt" in (run.paths.tuned_model / "chat_template.jinja").read_text()
    assert "full-fine-tuning" in (run.paths.tuned_model / "README.md").read_text()


def test_only_the_last_complete_checkpoint_will_do(
    base: Path, trained: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    run = run_on(tmp_path, base)
    with pytest.raises(UserError, match=r"checkpoints: no checkpoint; .*RUN_FILE --from train --force"):
        consolidate.work(run)
    add_checkpoint(run, trained, step=4)
    last = add_checkpoint(run, trained, step=12)
    record_training(run, 12)
    file = last / "__0_0.distcp"
    weights = open_checkpoint(last).tensors[5].pieces[0].offset
    content = file.read_bytes()
    file.write_bytes(content[:-10])
    with pytest.raises(UserError, match=r"step-\d{8}: .*__0_0\.distcp has"):
        consolidate.work(run)
    flipped = bytearray(content)
    flipped[weights] ^= 1
    file.write_bytes(flipped)
    with pytest.raises(UserError, match=r"__0_0\.distcp: is damaged: bytes \d+ to \d+ do not match the checksum"):
        consolidate.work(run)
    file.unlink()
    with pytest.raises(UserError, match=r"__0_0\.distcp is missing"):
        consolidate.work(run)
    file.write_bytes(content)
    record_training(run, 20)
    with pytest.raises(UserError, match="training ended at step 20"):
        consolidate.work(run)
    assert not run.paths.adapter.exists()
    record_training(run, 12)
    consolidate.work(run)


def test_a_checkpoint_of_the_other_method_is_refused(
    base: Path, trained: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    lora, full = run_on(tmp_path / "lora", base), run_on(tmp_path / "full", base, training={"method": "full"})
    model = AutoModelForCausalLM.from_pretrained(base)
    add_checkpoint(lora, tiny_checkpoints.trainable(model))
    add_checkpoint(full, trained)
    with pytest.raises(UserError, match="is not one of a LoRA adapter"):
        consolidate.work(lora)
    with pytest.raises(UserError, match="of the base model is missing"):
        consolidate.work(full)
    assert not lora.paths.adapter.exists() and not full.paths.tuned_model.exists()
