"""The kit's reward functions: pure functions of an answer's text, 1 where it is as wanted, else 0.

Only those that need other packages import them: a process that calls one of the others starts in a moment.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from hyperpod_ft.config import reward_schema

Score = Callable[[str, Mapping[str, Any]], float | None]
"""Of an answer, given the other columns of its row; None where that does not apply."""


def exact_match(completion: str, expected: object) -> float:
    """Whether the answer is the expected one; white space around either does not count."""
    return float(completion.strip() == str(expected).strip())


def regex(completion: str, pattern: str, match: str) -> float:
    """Whether a pattern matches the whole answer (`match` full), or is found in it (search)."""
    found = re.fullmatch(pattern, completion) if match == "full" else re.search(pattern, completion)
    return float(found is not None)


def valid_json(completion: str, follows: Callable[[Any], bool]) -> float:
    """Whether the answer is one JSON value (RFC 8259: NaN and infinities are none) that `follows` a schema."""
    try:
        value = json.loads(completion, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return 0.0
    return float(follows(value))


def _math_verify() -> Callable[[str, object], float | None]:
    """Whether an answer's last number or LaTeX expression equals the expected one; None if that is neither."""
    from math_verify import parse, verify  # noqa: PLC0415

    for part in ("parser", "grader"):  # they warn of every call without a timeout; the kit's own ends the process
        logging.getLogger(f"math_verify.{part}").setLevel(logging.ERROR)

    def score(completion: str, expected: object) -> float | None:
        text = str(expected)
        wanted = parse(text if "$" in text else f"${text}$", parsing_timeout=None)
        found = parse(completion, parsing_timeout=None)
        return float(verify(wanted, found, timeout_seconds=None)) if wanted else None

    return score


def length(completion: str, shortest: int, longest: int | None) -> float:
    """Whether the answer has as many characters, `longest` included; None: no limit."""
    return float(shortest <= len(completion) and (longest is None or len(completion) <= longest))


def named(settings: Mapping[str, Any]) -> Score:
    """The function of an entry of the run file's section `reward`, with its settings.

    The function raises KeyError for a row without the column that it compares with.
    """
    match settings["function"]:
        case "exact_match" | "math_verify" as name:
            compare = exact_match if name == "exact_match" else _math_verify()
            return lambda answer, columns: compare(answer, columns[settings["column"]])
        case "regex":
            return lambda answer, _: regex(answer, settings["pattern"], settings["match"])
        case "json":
            schema = settings["json_schema"]
            follows = (lambda _: True) if schema is None else reward_schema.validator(schema).is_valid
            return lambda answer, _: valid_json(answer, follows)
        case "length":
            return lambda answer, _: length(answer, settings["min_length"], settings["max_length"])
    raise AssertionError(settings["function"])


def _refuse(constant: str) -> None:
    raise ValueError(constant)
