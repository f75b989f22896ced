"""From raw rows of several sources to validation losses by source, with every stage's own program in between."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from hyperpod_ft.runs.results.training_summary import summary_of
from hyperpod_ft.stages import dataset as stage
from hyperpod_ft.stages.stage import perform
from tests.training.conftest import TrainProgram, metrics, tiny_llama
from tests.unit.stages.dataset_runs import TOKENIZER, mixed_run

pytestmark = pytest.mark.training


def rows(said: str, count: int) -> Iterator[dict[str, Any]]:
    return (
        {"instruction": f"which {number}", "input": "", "output": f"{said} {number % 3}"} for number in range(count)
    )


def test_what_is_trained_more_is_learned_better(tmp_path: Path, train_program: TrainProgram) -> None:
    sources = {
        "much": ("alpaca", rows("the quick fox", 60), {"weight": 9}),
        "little": ("text", [{"text": f"{number} brown clips {number}"} for number in range(60)], {"weight": 1}),
        "held": ("alpaca", rows("the quick fox", 5), {"validates": True}),
    }
    settings = {"training": {"max_steps": 12, "micro_batch_size": 2, "learning_rate": 1e-2, "precision": "fp32"}}
    settings["training"] |= {"method": "full", "validate_every_steps": 6}
    run = mixed_run(tmp_path, sources, settings, validation_share=0.1)
    AutoModelForCausalLM.from_config(tiny_llama(vocab_size=len(TOKENIZER))).save_pretrained(run.paths.base_model)
    perform(run, "dataset", stage.work)
    report = json.loads((run.paths.dataset_path / "report.json").read_text())
    assert [source["train_examples"] for source in report["sources"]] == [97, 11, 0]
    status, said = train_program(run)
    assert status == 0, said
    validated = [row for row in metrics(run) if row["validation_loss"] is not None]
    assert [row["step"] for row in validated] == [6, 12]
    names = [f"validation_loss/{name}" for name in ("much", "little", "held")]
    assert all(row[name] > 0 for row in validated for name in names)
    last = validated[-1]
    assert last["validation_loss/much"] < last["validation_loss/little"]
    assert last["validation_loss/held"] < last["validation_loss/little"], "as the source with such rows"
    assert min(last[name] for name in names) < last["validation_loss"] < max(last[name] for name in names)
    summary = summary_of(run)
    assert summary is not None and [*summary.validation_losses] == ["much", "little", "held"]
    assert "validation/little" in said
