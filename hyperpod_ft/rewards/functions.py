"""The kit's reward functions: pure functions of an answer's text, 1 where it is as wanted, else 0.

Imports only the standard library: a process that calls one starts in a moment.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

Score = Callable[[str, Mapping[str, Any]], float]
"""Of an answer, given the other columns of its row."""


def exact_match(completion: str, expected: object) -> float:
    """Whether the answer is the expected one; white space around either does not count."""
    return float(completion.strip() == str(expected).strip())


def regex(completion: str, pattern: str, match: str) -> float:
    """Whether a pattern matches the whole answer (`match` full), or is found in it (search)."""
    found = re.fullmatch(pattern, completion) if match == "full" else re.search(pattern, completion)
    return float(found is not None)


def valid_json(completion: str) -> float:
    """Whether the answer is one JSON value (RFC 8259: NaN and infinities are none)."""
    try:
        json.loads(completion, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return 0.0
    return 1.0


def length(completion: str, shortest: int, longest: int | None) -> float:
    """Whether the answer has as many characters, `longest` included; None: no limit."""
    return float(shortest <= len(completion) and (longest is None or len(completion) <= longest))


def named(settings: Mapping[str, Any]) -> Score:
    """The function of an entry of the run file's section `reward`, with its settings.

    The function raises KeyError for a row without the column that it compares with.
    """
    of: dict[str, Score] = {
        "exact_match": lambda answer, columns: exact_match(answer, columns[settings["column"]]),
        "regex": lambda answer, _: regex(answer, settings["pattern"], settings["match"]),
        "json": lambda answer, _: valid_json(answer),
        "length": lambda answer, _: length(answer, settings["min_length"], settings["max_length"]),
    }
    return of[settings["function"]]


def _refuse(constant: str) -> None:
    raise ValueError(constant)
