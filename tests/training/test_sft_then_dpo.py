"""docs/preferences.md: supervised fine-tuning, then preferences on its model; all stages, on plain processes."""

import json
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.config import run_file
from hyperpod_ft.config.run_config import StageName
from hyperpod_ft.engines.torch.objectives.preference_rows import PreferenceSplit
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import consolidate, dataset, download, merge, stage
from tests.training.conftest import kit, metrics, train_here
from tests.unit.stage_runs import finish

pytestmark = [pytest.mark.training, pytest.mark.timeout(600)]

ONE_RANK = ["cluster.nodes=1", "parallelism.tensor_parallel=1", "parallelism.ranks_per_node=1"]


def recipe(name: str, root: Path, *changes: str) -> Run:
    overrides = [f"cluster.root={root}", "training.max_steps=3", *changes]
    return Run.of(run_file.load(run_file.find(name), overrides))


def fine_tuned(root: Path) -> Path:
    """The model of the quickstart recipe, from its stages in this process."""
    run = recipe("quickstart", root, *ONE_RANK)
    run.freeze()
    finish(run, "env")
    works: dict[StageName, Any] = {"download": download.work, "dataset": dataset.work}
    for name, work in works.items():
        stage.perform(run, name, work)
    train_here(run)
    stage.perform(run, "consolidate", consolidate.work)
    stage.perform(run, "merge", merge.work)
    return run.tuned_model


def test_preferences_on_a_fine_tuned_model(tmp_path: Path) -> None:
    root = tmp_path / "root"
    short_answers = ("generate.train_samples=2", "generate.validation_samples=2", "generate.max_new_tokens=4")
    changes = [f"model.source={fine_tuned(root)}", "training.learning_rate=1.0e-2", *short_answers]
    run = recipe("quickstart-dpo", root, *changes)
    assert {"quickstart", "quickstart-dpo"} <= set(run_file.recipes())

    settings = [
        word for change in (f"cluster.root={root}", "training.max_steps=3", *changes) for word in ("--set", change)
    ]
    submitted = kit("submit", "quickstart-dpo", "--launcher", "process", "--watch", *settings, cwd=tmp_path)
    assert "tuned model" in submitted and "validation loss" in submitted
    facts = run.record("train").facts  # type: ignore[union-attr]
    assert facts["data_parallel"] == 2 and facts["final_loss"] < facts["first_loss"] == pytest.approx(0.6931, abs=1e-4)
    assert facts["validation_rewards/accuracies"] > 0.9
    assert [row["rewards/margins"] > 0 for row in metrics(run)] == [False, True, True]
    split = PreferenceSplit(run.dataset_path / "train")
    assert split.documents == 2 * json.loads((run.dataset_path / "report.json").read_text())["train_examples"]
    card = (run.tuned_model / "README.md").read_text(encoding="utf-8")
    assert "- dpo\n" in card and "direct preference optimization, beta 0.1" in card
    compared = kit("compare", str(run.directory), cwd=tmp_path)
    assert "validation rewards/accuracies" in compared and "100.0%" in compared
