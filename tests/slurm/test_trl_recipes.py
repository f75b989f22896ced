"""The recipes of engine trl on a real Slurm, from submit to the last stage, each with a rank killed in the middle."""

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hyperpod_ft.runs.results.samples import Samples
from hyperpod_ft.runs.results.training_summary import summary_of
from hyperpod_ft.runs.run import Run
from tests.slurm.head import Head
from tests.slurm.holding import hold, release, write_interpreter
from tests.slurm.test_pipeline import metrics, ranks_of
from tests.unit.test_examples import read_rows

pytestmark = [pytest.mark.slurm, pytest.mark.training, pytest.mark.timeout(1800)]


def facts_of(run: Run) -> Mapping[str, Any]:
    record = run.journal.record("train")
    assert record is not None
    return record.facts


def values_of(run: Run, name: str) -> list[Any]:
    return [row.get(name) for row in metrics(str(run.paths.directory))]


def card(run: Run) -> str:
    return (run.paths.tuned_model / "README.md").read_text(encoding="utf-8")


def kto(run: Run) -> None:
    """The base model answers in words, the tuned one in flags of the labeled form."""
    facts = facts_of(run)
    assert facts["base_validation_loss"] == pytest.approx(0.5) and facts["validation_loss"] < 0.45
    assert values_of(run, "rewards/margins")[0] == 0 and facts["rewards/margins"] > 1
    samples = Samples.read(run.paths.samples_path)
    assert samples.validation_loss is None
    with_flags = [("--" in answer.base, "--" in answer.tuned) for answer in samples.all_answers]
    assert sum(tuned > base for base, tuned in with_flags) > len(with_flags) / 2, samples.all_answers
    assert all(row.expected.startswith("--") for row in samples.samples)
    assert "Kahneman-Tversky optimization (KTO), beta 0.1" in card(run)


def grpo(run: Run) -> None:
    """The form of an answer is learned from rewards alone."""
    rewards = values_of(run, "reward")
    assert rewards[0] < 0.3 and max(rewards[-5:]) > 0.9, rewards
    summary = summary_of(run)
    assert summary and summary.reward == rewards[-1] and summary.completion_length
    answers = [prompt.tuned for prompt in Samples.read(run.paths.samples_path).prompts]
    assert sum(answer.startswith("nodes ") for answer in answers) > len(answers) / 2, answers
    assert "GRPO" in card(run)


def rloo(run: Run) -> None:
    assert Samples.read(run.paths.samples_path).answers_changed and "RLOO" in card(run)


def distillation(run: Run) -> None:
    """An answer that is in no data is learned."""
    losses = values_of(run, "loss")
    assert mean(losses[-5:]) < 0.3 * losses[0], losses
    answers = Samples.read(run.paths.samples_path).prompts
    assert not any(answer.base.startswith("--") for answer in answers)
    assert sum(answer.tuned.startswith("--") for answer in answers) > len(answers) / 2, answers


def reward(run: Run) -> None:
    tuned = AutoModelForSequenceClassification.from_pretrained(run.paths.tuned_model).eval()
    tokenizer = AutoTokenizer.from_pretrained(run.paths.tuned_model)

    def score(text: str) -> float:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            return float(tuned(ids).logits)

    pairs = read_rows("preferences.jsonl")[:20]
    assert all(score(pair["prompt"] + pair["chosen"]) > score(pair["prompt"] + pair["rejected"]) for pair in pairs)


def images(run: Run) -> None:
    """The tuned model has the weights of the lowest validation loss."""
    best, samples = facts_of(run)["best_validation_loss"], Samples.read(run.paths.samples_path)
    assert samples.validation_loss and samples.validation_loss.tuned.mean == pytest.approx(best, rel=1e-3)
    assert best < samples.validation_loss.base.mean / 2
    assert len(samples.samples) == 4 and all(row.images[0].jpeg for row in samples.samples)


# What is tested of each, and how it differs from its recipe: shorter, and one on two nodes. Each rank costs seconds.
ONE_RANK = "parallelism.ranks_per_node=1"
FEW = ("generate.train_samples=2", "generate.validation_samples=2", "generate.max_new_tokens=4")
RUNS: dict[Callable[[Run], None], tuple[str, ...]] = {
    kto: ("training.max_steps=12", ONE_RANK, *FEW),
    grpo: ("training.max_steps=14",),
    rloo: ("training.max_steps=8", "training.micro_batch_size=16", "training.objective=rloo", "name=quickstart-rloo"),
    distillation: ("training.max_steps=20", "training.micro_batch_size=16", "sampling.max_completion_length=16"),
    reward: ("training.max_steps=12", "cluster.nodes=2", ONE_RANK),
    images: ("training.max_steps=40", "training.keep_best=true", "generate.validation_samples=4"),
}


def test_each_recipe_ends_well_after_a_kill(head: Head, tmp_path: Path) -> None:
    root, python = tmp_path / "root", tmp_path / "interpreter" / "python"
    write_interpreter(python)
    for check, changes in RUNS.items():
        recipe = "quickstart-grpo" if check is rloo else f"quickstart-{check.__name__}"
        settings = (f"cluster.root={root}", f"env.python={python}", "training.save_every_steps=4", *changes)
        hold(python, f"quickstart-{check.__name__}", 5)
        head("submit", recipe, *(part for setting in settings for part in ("--set", setting)))
        head.wait(lambda: any((root / "records").glob("env-*.json")))  # which all share
    runs = {check: Run.open(next(root.glob(f"runs/quickstart-{check.__name__}/*"))) for check in RUNS}
    whole = {str(run.paths.directory) for run in runs.values()}

    def all_were_killed() -> bool:
        for directory in sorted(whole):
            if len(metrics(directory)) > 4:
                ranks = ranks_of(directory)
                assert ranks, f"{directory}: was done before"
                os.kill(ranks[0], signal.SIGKILL)
                release(python, Path(directory).parent.name, 5)
                whole.remove(directory)
        return not whole

    head.wait(all_were_killed, seconds=800, every=0.02)
    head.wait_for_the_queue(seconds=800, every=2)
    for check, run in runs.items():
        assert all(run.journal.record(stage.name) for stage in run.plan.stages), head(
            "status", str(run.paths.directory)
        )
        assert [restart["cause"] for restart in facts_of(run)["restarts"]] == ["crash"]
        assert facts_of(run)["resumed_from"][0] >= 4
        assert values_of(run, "step") == list(range(1, facts_of(run)["steps"] + 1))
        check(run)
