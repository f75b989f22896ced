"""Expected: what rouge-score 0.1.2 says, by RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False)."""

import pytest

from hyperpod_ft.evaluation.rouge import mean, rouge
from hyperpod_ft.runs.results.samples import Rouge


@pytest.mark.parametrize(
    ("answer", "expected", "scores"),
    [
        ("The cat sat on the mat.", "the cat lay on a mat", "0.667/0.200/0.667"),
        ("b a c, d!", "A b c-d e", "0.889/0.286/0.667"),
        ("the the the", "the cat the dog", "0.571/0.000/0.571"),
        ("one two three four", "four three two one", "1.000/0.000/0.250"),
        ("", "x", "0.000/0.000/0.000"),
        ("...", "x", "0.000/0.000/0.000"),
    ],
)
def test_as_rouge_score(answer: str, expected: str, scores: str) -> None:
    assert str(rouge(answer, expected)) == scores


def test_words_of_other_scripts_count() -> None:
    assert mean([("Кот спит", "кот ест"), ("été_2", "Été 2")]) == Rouge(0.75, 0.5, 0.75)


def test_marks_are_part_of_their_words() -> None:
    """A vowel sign distinguishes Hindi words, an accent may be a character of its own, and an emoji's is no word."""
    assert (
        rouge("\u0939\u093f\u0928\u094d\u0926\u0940 \u0939\u0948", "\u0939\u093f\u0928\u0926 \u0939\u0948").rouge_1
        == 0.5
    )
    assert rouge("e\u0301te\u0301", "\u00e9t\u00e9") == Rouge(1, 0, 1)
    assert rouge("\u2764\ufe0f", "\u2764\ufe0f") == Rouge(0, 0, 0)
