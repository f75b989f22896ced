import json
from pathlib import Path

import pytest

from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.results.samples import (
    AnswerCount,
    Loss,
    Losses,
    RecordedAnswers,
    Rouge,
    RougeScores,
    SampledRow,
    Samples,
)

SAMPLES = Samples.of(
    [RecordedAnswers("<s>p", True, "b", "t")],
    [
        SampledRow.of("train", RecordedAnswers("q", False, "x", "y"), "y"),
        SampledRow.of("validation", RecordedAnswers("r", False, "z", "z"), "é"),
    ],
    answers_changed=2,
    validation_loss=Losses(Loss(2.5, 10, 1, 1), Loss(1.5, 10, 1, 1)),
    rouge={"validation": RougeScores(1, Rouge(0.25, 0, 0.125), Rouge(1, 0.5, 0.75))},
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    SAMPLES.write(tmp_path / "samples.json")
    assert Samples.read(tmp_path / "samples.json") == SAMPLES
    assert SAMPLES.all_answers == [
        RecordedAnswers("<s>p", True, "b", "t"),
        RecordedAnswers("q", False, "x", "y"),
        RecordedAnswers("r", False, "z", "z"),
    ]
    assert [answers.prompt for answers in SAMPLES.unseen_first] == ["<s>p", "r", "q"]
    rouge = "ROUGE-1/2/L, validation rows: base 0.250/0.000/0.125, tuned 1.000/0.500/0.750"
    assert SAMPLES.lines()[-1] == rouge
    assert SAMPLES.exact_match == {"train": AnswerCount(1, 0, 1), "validation": AnswerCount(1, 0, 0)}


def test_the_record_has_the_numbers_without_the_answers(tmp_path: Path) -> None:
    SAMPLES.write(tmp_path / "samples.json")
    written = json.loads((tmp_path / "samples.json").read_text())
    assert {key: value for key, value in written.items() if key not in ("prompts", "samples")} == SAMPLES.summary()
    assert (SAMPLES.summary()["answers"], SAMPLES.summary()["answers_changed"]) == (3, 2)


def test_answers_are_compared_by_what_a_pattern_finds() -> None:
    def number(text: str) -> str | None:
        return text.rpartition("#")[2] if "#" in text else None

    rows = [
        SampledRow.of("train", RecordedAnswers("q", False, "x#5", "y#7"), "z#7", number),
        SampledRow.of("train", RecordedAnswers("q", False, "x", "z#7"), "z#7", number),
        SampledRow.of("train", RecordedAnswers("q", False, "x", "x"), "without", number),
    ]
    samples = Samples.of([], rows, 3, None)
    assert samples.pattern_match == {"train": AnswerCount(2, 0, 2), "validation": AnswerCount(0, 0, 0)}
    assert samples.lines() == [
        "exact answers, train rows: base 0/3, tuned 1/3",
        "answers by pattern, train rows: base 0/2, tuned 2/2",
    ]


@pytest.mark.parametrize("text", ["", "{}", '{"prompts": [{"prompt": "p"}], "samples": []}'])
def test_a_damaged_file_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "samples.json").write_text(text)
    with pytest.raises(UserError, match=r"samples\.json: is damaged.*stage generate"):
        Samples.read(tmp_path / "samples.json")
