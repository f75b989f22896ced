"""The kit's own reward functions."""

from typing import Any

import pytest

from hyperpod_ft.config.sections.rewards import Reward
from hyperpod_ft.rewards.functions import named


@pytest.mark.parametrize(
    ("settings", "rewarded", "not_rewarded"),
    [
        ({"function": "exact_match", "column": "answer"}, ["42", " 42\n"], ["4", "42.", ""]),
        ({"function": "regex", "pattern": r"\d+"}, ["42"], ["it is 42", "42\n", ""]),
        ({"function": "regex", "pattern": r"\d+", "match": "search"}, ["42", "it is 42"], ["forty", ""]),
        ({"function": "json"}, ['{"a": [1, null]}', " 3 "], ["{'a': 1}", "NaN", '{"a": 1} and more', "", "[" * 10**5]),
        ({"function": "length", "min_length": 2, "max_length": 3}, ["ab", "äöü"], ["a", "abcd", ""]),
        ({"function": "length", "min_length": 2}, ["ab", "a" * 999], ["a"]),
    ],
)
def test_what_is_rewarded(settings: dict[str, Any], rewarded: list[str], not_rewarded: list[str]) -> None:
    function = named(Reward.model_validate(settings).model_dump())
    assert [function(answer, {"answer": 42}) for answer in rewarded] == [1.0] * len(rewarded)
    assert [function(answer, {"answer": 42}) for answer in not_rewarded] == [0.0] * len(not_rewarded)
