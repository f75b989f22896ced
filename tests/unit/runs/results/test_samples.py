import json
from pathlib import Path

import pytest

from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.results.samples import ExactCount, Loss, Losses, RecordedAnswers, SampledRow, Samples

SAMPLES = Samples.of(
    [RecordedAnswers("<s>p", True, "b", "t")],
    [
        SampledRow.of("train", RecordedAnswers("q", False, "x", "y"), "y"),
        SampledRow.of("validation", RecordedAnswers("r", False, "z", "z"), "é"),
    ],
    answers_changed=2,
    validation_loss=Losses(Loss(2.5, 10, 1, 1), Loss(1.5, 10, 1, 1)),
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    SAMPLES.write(tmp_path / "samples.json")
    assert Samples.read(tmp_path / "samples.json") == SAMPLES
    assert SAMPLES.all_answers == [
        RecordedAnswers("<s>p", True, "b", "t"),
        RecordedAnswers("q", False, "x", "y"),
        RecordedAnswers("r", False, "z", "z"),
    ]
    assert SAMPLES.exact_match == {"train": ExactCount(1, 0, 1), "validation": ExactCount(1, 0, 0)}


def test_the_record_has_the_numbers_without_the_answers(tmp_path: Path) -> None:
    SAMPLES.write(tmp_path / "samples.json")
    written = json.loads((tmp_path / "samples.json").read_text())
    assert {key: value for key, value in written.items() if key not in ("prompts", "samples")} == SAMPLES.summary()
    assert (SAMPLES.summary()["answers"], SAMPLES.summary()["answers_changed"]) == (3, 2)


@pytest.mark.parametrize("text", ["", "{}", '{"prompts": [{"prompt": "p"}], "samples": []}'])
def test_a_damaged_file_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "samples.json").write_text(text)
    with pytest.raises(UserError, match=r"samples\.json: is damaged.*stage generate"):
        Samples.read(tmp_path / "samples.json")
