"""What the card of a tuned model says about its data."""

from pathlib import Path

import pytest
import yaml

from hyperpod_ft.stages.model_card import model_card
from tests.conftest import MakeRun


def test_the_card_names_every_source(make_run: MakeRun, tmp_path: Path) -> None:
    here = tmp_path / "rows.jsonl"
    here.write_text("{}\n")
    sources = [
        {"source": "org/chats", "format": "chat", "split": "train[:9]"},
        {"source": "org/chats", "format": "chat", "split": "train[9:]", "name": "rest"},
        {"source": str(here), "format": "text"},
    ]
    held_out = {"source": "org/exam", "revision": "v1", "format": "alpaca"}
    run = make_run(dataset={"sources": sources, "validation_source": held_out})
    card = model_card(run, "the base model's own")
    header = yaml.safe_load(card.split("---\n")[1])
    assert header["datasets"] == ["org/chats", "org/exam"], "the Hub's, each once"
    (row,) = (line for line in card.splitlines() if line.startswith("| dataset |"))
    assert row.startswith(f"| dataset | org/chats @ main, {here} @ local-") and row.endswith(", org/exam @ v1 |")


def test_the_card_shows_added_tokens_as_code(make_run: MakeRun) -> None:
    tokens = {"new_tokens": ["<tool>", "a`b"], "new_special_tokens": ["<|end|>"]}
    run = make_run(model={"source": "some/llama", **tokens}, training={"method": "full"})
    card = model_card(run, "the base model's own")
    assert "\n| tokens added | `'<tool>'` ``'a`b'`` `'<\\|end\\|>'` |\n" in card


@pytest.mark.parametrize(
    ("formats", "asked"),
    [(("text", "alpaca", "chat"), "chat"), (("text", "dolly", "alpaca"), "dolly"), (("text", "text"), "text")],
)
def test_a_question_is_written_as_the_rows_that_have_some(
    make_run: MakeRun, formats: tuple[str, ...], asked: str
) -> None:
    sources = [{"source": f"org/{number}", "format": one} for number, one in enumerate(formats)]
    assert make_run(dataset={"sources": sources}).config.dataset.questions.format == asked
