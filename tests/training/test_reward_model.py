"""Reward models: trained as by a plain trainer of TRL, and whole for transformers and PEFT in the end."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer

from hyperpod_ft.checkpoint.formats.safetensors_file import read_model
from hyperpod_ft.checkpoint.score_head import add_score, scored_bytes
from hyperpod_ft.checkpoint.verify.verify import verify
from hyperpod_ft.cli.output import show_runs
from hyperpod_ft.engines.batches import Batch, DataOrder, PackedSplit
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.serving import models
from hyperpod_ft.stages import consolidate, merge, stage
from tests.training.conftest import metrics, train_here
from tests.training.test_kto import LENGTH, STEPS, prepared
from tests.training.test_packed_families import SETTINGS
from tests.unit import tiny_tokenizer
from tests.unit.tiny_families import DENSE, SIZES

pytestmark = pytest.mark.training
PAIRS: list[dict[str, Any]] = [
    {"prompt": f"how many {word}s", "chosen": f" quick {word}", "rejected": f" the how many {word}"}
    for word in ("clip", "fox", "context", "brown", "answer", "instruction", "how", "many")
]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_reward_model_is_trained_as_by_a_plain_trainer_and_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    seen: list[dict[str, torch.Tensor]] = []
    compute = RewardTrainer.compute_loss

    def watched(self: Any, model: Any, inputs: dict[str, torch.Tensor], *others: Any, **named: Any) -> Any:
        if self.model.training:
            seen.append({name: tensor for name, tensor in inputs.items() if isinstance(tensor, torch.Tensor)})
        return compute(self, model, inputs, *others, **named)

    training = {"objective": "reward", "method": method, "validate_every_steps": 2}
    run = prepared(tmp_path, [PAIRS], {"training": training, "dataset": {"validation_share": 0.25}})
    assert "generate" not in run.plan
    monkeypatch.setattr(RewardTrainer, "compute_loss", watched)
    train_here(run)
    ours = seen[:]
    found, facts = metrics(run), run.journal.record("train").facts  # type: ignore[union-attr]
    assert [found[0]["loss"], facts["base_validation_loss"]] == pytest.approx([np.log(2)] * 2, rel=1e-6)
    assert facts["validation_loss"] < 0.65 and found[-1]["margin"] > 0
    if method == "full":
        compare_with_plain(run, tmp_path, seen, ours, found)
    stage.perform(run, "consolidate", consolidate.work)
    if method == "lora":
        stage.perform(run, "merge", merge.work)
    tuned = AutoModelForSequenceClassification.from_pretrained(run.paths.tuned_model).eval()
    assert tuned.config.num_labels == 1 and {"score.weight"} == {
        tensor.name
        for tensor in read_model(run.paths.tuned_model)
        if "score" in tensor.name or "lm_head" in tensor.name
    }
    tokenizer = tiny_tokenizer.make()
    texts = [
        [tokenizer(f"{pair['prompt']}{pair[kind]}{tokenizer.eos_token}") for pair in PAIRS]
        for kind in ("chosen", "rejected")
    ]
    with torch.no_grad():
        chosen, rejected = (
            torch.cat([tuned(torch.tensor([one["input_ids"]])).logits[:, 0] for one in of]) for of in texts
        )
        assert bool((chosen > rejected).all())
        if method == "lora":  # as PEFT's own users load it, on the model that was fetched
            base = AutoModelForSequenceClassification.from_pretrained(run.paths.fetched_model, num_labels=1)
            base.config.pad_token_id = tuned.config.pad_token_id
            adapted = PeftModel.from_pretrained(base, run.paths.adapter).eval()
            for one, score in zip(texts[0], chosen, strict=True):
                assert torch.allclose(adapted(torch.tensor([one["input_ids"]])).logits[0, 0], score, atol=1e-5)
    if method == "lora":
        merged = verify(run.paths.tuned_model, base=run.paths.base_model, adapter=run.paths.adapter, logits=True)
        assert merged.logits and not merged.findings
    for base in (run.paths.base_model, run.paths.fetched_model):
        assert verify(run.paths.tuned_model, base=base).findings == ()
    show_runs.results(run)
    assert capsys.readouterr().out.splitlines()[-1].startswith("Report: ")
    with pytest.raises(UserError, match="is a reward model, which writes no answers"):
        models.find(str(run.paths.directory), Launchers())


@pytest.mark.parametrize("family", sorted({*DENSE} - {"granite"}))
def test_every_type_gets_a_score_that_transformers_knows(tmp_path: Path, family: str) -> None:
    config = AutoConfig.for_model(family, **SIZES | {"vocab_size": 300} | SETTINGS.get(family, {}))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path, max_shard_size="50KB")
    tiny_tokenizer.make().save_pretrained(tmp_path)
    assert scored_bytes(tmp_path) > 0 and add_score(tmp_path) == "output layer replaced by a score"
    assert "score.weight" in {tensor.name for tensor in read_model(tmp_path)}  # which compares the index with the files
    loaded, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not loaded.score.weight.any()
    assert [type(loaded).__name__] == loaded.config.architectures and loaded.config.pad_token_id == 1
    with pytest.raises(UserError, match=r"config\.json is of a .*ForSequenceClassification"):
        add_score(tmp_path)


def compare_with_plain(run: Any, tmp_path: Path, seen: list[Any], ours: list[Any], found: list[Any]) -> None:
    seen.clear()
    split = PackedSplit(run.paths.dataset_path / "train")
    order = DataOrder(len(split), 42, 4, 2, 1)
    batch = split.batch(np.concatenate([order.step(step) for step in range(1, STEPS + 1)]))
    assert isinstance(batch, Batch)
    tokenizer = tiny_tokenizer.make()
    pairs = []
    for ids, positions in zip(batch.input_ids, batch.position_ids, strict=True):
        _, end, *_ = *torch.nonzero(positions == 0).flatten().tolist(), LENGTH
        text = tokenizer.decode(ids[:end], skip_special_tokens=True)
        pairs.append(next(pair for pair in PAIRS if pair["prompt"] + pair["chosen"] == text))
    trainer = RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(run.paths.base_model, attn_implementation="eager"),
        args=RewardConfig(
            output_dir=str(tmp_path / "plain"),
            max_steps=STEPS,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            gradient_checkpointing=False,
            learning_rate=5e-3,
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
        ),
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer,
    )
    trainer.train()
    assert len(ours) == len(seen) == 2 * STEPS
    for mine, theirs in zip(ours, seen, strict=True):
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    logged = [row for row in trainer.state.log_history if "loss" in row]
    for name in ("loss", "grad_norm", "accuracy", "margin"):
        assert [row[name] for row in found] == pytest.approx([row[name] for row in logged], rel=1e-4, abs=1e-6), name
