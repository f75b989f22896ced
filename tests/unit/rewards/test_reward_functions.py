"""The kit's own reward functions."""

from typing import Any

import pytest

from hyperpod_ft.config.sections.rewards import Reward
from hyperpod_ft.rewards.functions import named

SCHEMA = {"required": ["a"], "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("settings", "rewarded", "not_rewarded"),
    [
        ({"function": "exact_match", "column": "answer"}, ["42", " 42\n"], ["4", "42.", ""]),
        ({"function": "regex", "pattern": r"\d+"}, ["42"], ["it is 42", "42\n", ""]),
        ({"function": "regex", "pattern": r"\d+", "match": "search"}, ["42", "it is 42"], ["forty", ""]),
        ({"function": "json"}, ['{"a": [1, null]}', " 3 "], ["{'a': 1}", "NaN", '{"a": 1} and more', "", "[" * 10**5]),
        (
            {"function": "json", "json_schema": SCHEMA},
            ['{"a": 1}', "3"],
            ['{"a": "1"}', "{}", "{a: 1}", "[" * 10**5],
        ),
        (
            {"function": "math_verify", "column": "answer"},
            ["42", "It is 41 + 1 = 42.", r"so \boxed{\frac{84}{2}}", "$42.0$"],
            ["41", "forty-two", ""],
        ),
        ({"function": "length", "min_length": 2, "max_length": 3}, ["ab", "äöü"], ["a", "abcd", ""]),
        ({"function": "length", "min_length": 2}, ["ab", "a" * 999], ["a"]),
    ],
)
def test_what_is_rewarded(settings: dict[str, Any], rewarded: list[str], not_rewarded: list[str]) -> None:
    function = named(Reward.model_validate(settings).model_dump())
    assert [function(answer, {"answer": 42}) for answer in rewarded] == [1.0] * len(rewarded)
    assert [function(answer, {"answer": 42}) for answer in not_rewarded] == [0.0] * len(not_rewarded)


@pytest.mark.parametrize(
    ("expected", "reward"), [("1/2", 1.0), (r"$\frac{1}{2}$", 1.0), ("0.5", 1.0), ("2x+1", 0.0), ("", None)]
)
def test_an_expression_equals_another_one(expected: str, reward: float | None) -> None:
    """A row whose expected answer is no expression has no reward of it."""
    function = named(Reward.model_validate({"function": "math_verify", "column": "answer"}).model_dump())
    assert function(r"It is $\frac{2}{4}$.", {"answer": expected}) == reward
