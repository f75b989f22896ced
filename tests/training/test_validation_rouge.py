"""ROUGE of a T5's answers while it trains: no bit of the training changes, on one rank, on two, and after a restart."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from hyperpod_ft.checkpoint.sharded import description
from hyperpod_ft.data.prepared import Sample, write_samples
from hyperpod_ft.runs.results.metrics import ROUGE
from hyperpod_ft.runs.run import Run
from tests.training.conftest import Jobs, MakeRun, curve, metrics, train_here, write_pairs
from tests.unit import tiny_t5

pytestmark = pytest.mark.training

ASKED = {"training.validate_rouge_rows": 5}
PAIRS = {
    "dataset.format": "prompt-completion",
    "dataset.max_target_length": 16,
    "generate.max_new_tokens": 12,
    "training.max_steps": 6,
    "training.validate_every_steps": 2,
    "training.save_every_steps": 2,
    "training.activation_checkpointing": "selective",
    "lora": {"r": 4, "alpha": 8, "dropout": 0.1, "target_modules": ["q", "k", "v", "o", "wi_0", "wi_1", "wo"]},
}
FULL = {"training.method": "full", "lora": {"target_modules": ["q"]}}
TWO_RANKS = {"parallelism": {"ranks_per_node": 2}, "training.micro_batch_size": 1}
WORDS = [tiny_t5.PAD, tiny_t5.EOS, tiny_t5.UNK, *(f"word{number}" for number in range(3, 128))]  # a token each


@pytest.fixture
def make_asked(make_run: MakeRun) -> MakeRun:
    """A run whose dataset has validation rows, and samples whose answers have words of any model's."""

    def make(name: str, settings: dict[str, Any]) -> Run:
        model = tiny_t5.config(dropout_rate=0.1)
        run = make_run(name, PAIRS | settings, model=model)
        tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, tiny_t5.UNK))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(run.paths.base_model / "tokenizer.json"))
        described = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": tiny_t5.PAD, "eos_token": tiny_t5.EOS}
        (run.paths.base_model / "tokenizer_config.json").write_text(json.dumps(described))
        write_pairs(run.paths.dataset_path / "validation", 4, (32, 16), seed=1)
        texts = [(" ".join(WORDS[3 + first : 9 + 2 * first]), " ".join(WORDS[3 + first :: 2])) for first in range(7)]
        write_samples(run.paths.dataset_path, [Sample("validation", *text) for text in texts])
        return run

    return make


def scores(run: Run) -> list[tuple[float, ...]]:
    """At each validation."""
    return [tuple(row[key] for key in ROUGE) for row in metrics(run) if row["validation_loss"] is not None]


def what_was_trained(run: Run) -> tuple[list[Any], list[str]]:
    """All losses, and the digests of weights, optimizer and generators after each step that was saved."""
    losses = [(*step, row["validation_loss"]) for step, row in zip(curve(run), metrics(run), strict=True)]
    saved = [
        found for step in sorted(run.paths.checkpoints.glob("step-*")) for found in description.digests(step).items()
    ]
    tensors = [digest for path, digest in saved if path.suffix == ".distcp"]
    assert len(tensors) == 2 * run.plan.degrees.world_size, "the two newest checkpoints"
    return losses, tensors


@pytest.mark.parametrize("settings", [{}, FULL | {"training.precision": "bf16"}], ids=["lora", "full, bf16"])
def test_no_bit_of_the_training_changes(make_asked: MakeRun, settings: dict[str, Any]) -> None:
    """Nor after a restart, whose validations give the same too."""
    plain, asked = make_asked("plain", settings), make_asked("asked", settings | ASKED)
    train_here(plain)
    facts = train_here(asked).facts
    assert what_was_trained(asked) == what_was_trained(plain)
    found = scores(asked)
    assert len(found) == 3 and found[-1] == tuple(facts[key] for key in ROUGE)
    assert len({one for one, *_ in found}) > 1 and all(0 < one < 1 for one, *_ in found), found
    before = [facts[f"base_{key}"] for key in ROUGE]
    asked.paths.record_path("train").unlink()
    (asked.paths.checkpoints / "step-00000006" / "checkpoint.json").unlink()
    facts = train_here(asked).facts
    assert facts["resumed_from"] == [4] and scores(asked) == found
    assert [facts[f"base_{key}"] for key in ROUGE] == before
    assert what_was_trained(asked) == what_was_trained(plain)


def test_two_ranks_divide_the_samples(make_asked: MakeRun, jobs: Jobs) -> None:
    plain, asked = make_asked("plain", TWO_RANKS), make_asked("asked", TWO_RANKS | ASKED)
    jobs.train(plain)
    printed = jobs.train(asked)
    assert what_was_trained(asked) == what_was_trained(plain)
    found = scores(asked)
    assert len(found) == printed.count("  ROUGE-L ") == 3
    asked.paths.record_path("train").unlink()
    (asked.paths.checkpoints / "step-00000006" / "checkpoint.json").unlink()
    assert "train: resuming from step 4" in jobs.train(asked) and scores(asked) == found
    assert what_was_trained(asked) == what_was_trained(plain)
    alone = make_asked("alone", ASKED)
    base, of_two = train_here(alone).facts, asked.journal.record("train").facts  # type: ignore[union-attr]
    assert [of_two[f"base_{key}"] for key in ROUGE] == [base[f"base_{key}"] for key in ROUGE], "of the same weights"
