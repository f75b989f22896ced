"""docs/methods.md: supervised fine-tuning, then preferences on its model; all stages."""

import json
from pathlib import Path

import pytest

from hyperpod_ft.config import run_file
from hyperpod_ft.engines.batches import PreferenceSplit
from hyperpod_ft.runs.run import Run
from tests.training.conftest import Jobs, kit, metrics
from tests.training.every_stage import perform

pytestmark = [pytest.mark.training, pytest.mark.timeout(600)]

ONE_RANK = ["cluster.nodes=1", "parallelism.tensor_parallel=1", "parallelism.ranks_per_node=1"]


def recipe(name: str, root: Path, *changes: str) -> Run:
    overrides = [f"cluster.root={root}", "training.max_steps=3", *changes]
    return Run.of(run_file.load(run_file.find(name), overrides))


def test_preferences_on_a_fine_tuned_model(tmp_path: Path, jobs: Jobs) -> None:
    root = tmp_path / "root"
    short_answers = ["generate.train_samples=2", "generate.validation_samples=2", "generate.max_new_tokens=4"]
    base = perform(recipe("quickstart", root, *ONE_RANK, *short_answers)).paths.tuned_model
    run = recipe("quickstart-dpo", root, f"model.source={base}", "training.learning_rate=1.0e-2", *short_answers)
    assert {"quickstart", "quickstart-dpo"} <= set(run_file.recipes())
    perform(run, jobs.train)
    facts = run.journal.record("train").facts  # type: ignore[union-attr]
    assert facts["data_parallel"] == 2 and facts["final_loss"] < facts["first_loss"] == pytest.approx(0.6931, abs=1e-4)
    assert facts["validation_rewards/accuracies"] > 0.9
    assert [row["rewards/margins"] > 0 for row in metrics(run)] == [False, True, True]
    split = PreferenceSplit(run.paths.dataset_path / "train")
    assert split.documents == 2 * json.loads((run.paths.dataset_path / "report.json").read_text())["train_examples"]
    card = (run.paths.tuned_model / "README.md").read_text(encoding="utf-8")
    assert "- dpo\n" in card and "direct preference optimization, beta 0.1" in card
    compared = kit("compare", str(run.paths.directory))
    assert "validation rewards/accuracies" in compared and "100.0%" in compared
