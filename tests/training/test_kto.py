"""KTO: labels and rows are prepared as given, and batches and losses are those of a plain trainer of TRL."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl.trainer.kto_config import KTOConfig
from trl.trainer.kto_trainer import KTOTrainer

from hyperpod_ft.config import run_file
from hyperpod_ft.engines.batches import Batch, DataOrder, PackedSplit
from hyperpod_ft.engines.throughput import throughput
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import dataset, download, stage
from tests.tasks import task_of
from tests.training.conftest import metrics, tiny_llama, train_here
from tests.unit import tiny_tokenizer
from tests.unit.stage_runs import finish

pytestmark = pytest.mark.training
ROWS: list[dict[str, Any]] = [
    {"prompt": f"how many {word}s" * times, "completion": f" {answer} {word}" * (5 - times), "label": answer == "quick"}
    for times, word in enumerate(("clip", "fox", "context", "brown"), 1)
    for answer in ("quick", "the how many")
]
STEPS, LENGTH = 4, 38


def prepared(tmp_path: Path, sources: list[list[dict[str, Any]]], settings: dict[str, Any] | None = None) -> Run:
    """A run whose rows stage dataset has prepared, from a source for each list."""
    tokenizer, model = tiny_tokenizer.make(), tmp_path / "model"
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(tiny_llama(vocab_size=len(tokenizer))).save_pretrained(model)
    tokenizer.save_pretrained(model)
    for number, rows in enumerate(sources):
        (tmp_path / f"rows{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kto = "label" in sources[0][0]
    form = "unpaired-preference" if kto else "preference"
    listed = [{"source": f"./rows{number}.jsonl", "format": form} for number in range(len(sources))]
    values: dict[str, Any] = {
        "name": "run",
        "engine": "trl",
        "cluster": {"root": str(tmp_path / "root"), "instance_type": "local"},
        "model": {"source": str(model)},
        "dataset": {"sources": listed, "max_length": LENGTH, "validation_share": 0},
        "kto": {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.8} if kto else {},
        "training": {
            "method": "full",
            "objective": "kto",
            "precision": "fp32",
            "micro_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_steps": STEPS,
            "learning_rate": 5e-3,
            "schedule": "constant",
            "warmup_share": 0,
        },
        "parallelism": {"ranks_per_node": 1},
    }
    for section, changes in (settings or {}).items():
        values[section] |= changes
    run = Run.of(run_file.resolve(run_file.validate(values, "run"), tmp_path))
    run.paths.directory.mkdir(parents=True, exist_ok=True)
    run.freeze()
    finish(run, "env")
    finish(run, "certify")
    for each in (download, dataset):
        stage.perform(run, each.__name__.rpartition(".")[2], each.work)
    return run


def row_of(batch: Batch, row: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The raw row that a prepared one was made of."""
    _, end, *_ = *torch.nonzero(batch.position_ids[row] == 0).flatten().tolist(), LENGTH
    text = tiny_tokenizer.make().decode(batch.input_ids[row, :end], skip_special_tokens=True)
    return next(one for one in rows if one["prompt"] + one["completion"] == text)


def test_batches_and_losses_are_those_of_a_plain_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token, the mismatched completions too, of which some are cut."""
    seen: list[dict[str, torch.Tensor]] = []
    compute = KTOTrainer._compute_loss

    def watched(self: Any, model: Any, inputs: dict[str, torch.Tensor], return_outputs: bool) -> Any:
        seen.append(inputs)
        return compute(self, model, inputs, return_outputs)

    monkeypatch.setattr(KTOTrainer, "_compute_loss", watched)
    run = prepared(tmp_path, [ROWS])
    train_here(run)
    assert throughput(task_of(run), 4, LENGTH, 1000).flops_per_token is None
    ours, rows = seen[:], PackedSplit(run.paths.dataset_path / "train")
    seen.clear()

    order = DataOrder(len(ROWS), 42, 4, 2, 1)
    batch = rows.batch(np.concatenate([order.step(step) for step in range(1, STEPS + 1)]))
    assert isinstance(batch, Batch)
    trainer = KTOTrainer(
        model=AutoModelForCausalLM.from_pretrained(run.paths.base_model, attn_implementation="eager"),
        args=KTOConfig(
            output_dir=str(tmp_path / "plain"),
            max_steps=STEPS,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            gradient_checkpointing=False,
            learning_rate=5e-3,
            lr_scheduler_type="constant",
            bf16=False,
            use_cpu=True,
            max_length=LENGTH,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            **run.config.kto.model_dump(),
        ),
        train_dataset=Dataset.from_list([row_of(batch, row, ROWS) for row in range(len(batch.input_ids))]),
        processing_class=tiny_tokenizer.make(),
    )
    trainer.train()
    assert len(ours) == len(seen) == 2 * STEPS
    for batch_of_ours, theirs in zip(ours, seen, strict=True):
        assert batch_of_ours.keys() == theirs.keys()
        for prefix in ("", "KL_"):
            mask = theirs[f"{prefix}attention_mask"]
            for name in ("attention_mask", "completion_mask", "input_ids"):  # what pads is not compared
                assert torch.equal(batch_of_ours[f"{prefix}{name}"] * mask, theirs[f"{prefix}{name}"] * mask), name
        assert torch.equal(batch_of_ours["label"], theirs["label"])
    assert {len(batch["KL_input_ids"][0]) for batch in seen} >= {LENGTH}, "none was cut"
    logged = [row for row in trainer.state.log_history if "loss" in row]
    for name in ("loss", "grad_norm", "kl", "rewards/chosen", "rewards/rejected", "rewards/margins"):
        # a micro batch may have no completion of a kind
        found, expected = ([row.get(name, math.nan) for row in of] for of in (metrics(run), logged))
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6, nan_ok=True), name
    assert logged[-1]["kl"] > 0


def test_labels_belong_to_their_rows(tmp_path: Path) -> None:
    """Whatever source and split they are drawn for, and where some rows cannot be used."""
    more = [row | {"prompt": f"brown {row['prompt']}"} for row in ROWS]
    unusable = [{"prompt": "a", "completion": " ", "label": True}, {"prompt": "a", "completion": "b", "label": 1}]
    settings = {"dataset": {"validation_share": 0.4, "max_bad_rows": 2, "max_length": 64}}
    run = prepared(tmp_path, [[unusable[0], *ROWS], [*more[:3], unusable[1], *more[3:]]], settings)
    report = json.loads((run.paths.dataset_path / "report.json").read_text())
    assert report["bad_reasons"] == {"empty completion": 1, "field 'label' is neither true nor false": 1}
    train = 0
    for split in ("train", "validation"):
        batch = PackedSplit(run.paths.dataset_path / split).batch(np.arange(report[f"{split}_rows"]))
        assert isinstance(batch, Batch) and batch.desirable is not None
        labels = [row_of(batch, row, [*ROWS, *more])["label"] for row in range(len(batch.input_ids))]
        assert batch.desirable.tolist() == labels and len({*labels}) == 2
        train = train or sum(labels)
    assert report["desirable_examples"] == train and report["validation_rows"] > 4
    samples = [json.loads(line) for line in (run.paths.dataset_path / "samples.jsonl").read_text().splitlines()]
    assert samples and all(sample["completion"].startswith(" quick") for sample in samples)
