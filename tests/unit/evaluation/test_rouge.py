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
