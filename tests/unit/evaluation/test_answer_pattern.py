"""What a pattern finds in answers, also in those for which it would need ages."""

import re
import time

import pytest

from hyperpod_ft.evaluation.answers import found_in

NUMBER = re.compile(r"#### (-?[0-9.,]+)")


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        (NUMBER, "48 + 24 = 72\n#### 72\n\n#### 5", "72"),
        (NUMBER, "it is 72", None),
        (re.compile(r"yes|no"), "well, no", "no"),
        (re.compile(r"(a)|(b)"), "b", None),
    ],
)
def test_the_first_match_counts(pattern: re.Pattern[str], text: str, found: str | None) -> None:
    assert found_in(pattern, text) == found


def test_a_pattern_that_needs_ages_for_an_answer_finds_nothing() -> None:
    started = time.process_time()
    assert found_in(re.compile(r"(a+)+$"), "a" * 60 + "b") is None
    assert time.process_time() - started < 10
    assert found_in(NUMBER, "#### 1") == "1", "the next answer is searched"
