"""The program that calls one reward function, for `process.py`.

Reads lines of JSON from standard input: first which function, then a call each. Answers each line with one: {} when the
function is there, then {"reward": number or null}, or {"error": text}. What the function prints goes to standard error.
"""

import importlib.util
import inspect
import json
import math
import numbers
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from hyperpod_ft.processes import die_with_parent
from hyperpod_ft.rewards.functions import named

_MODULE = "hyperpod_ft_rewards"


def answer(function: Callable[..., Any], call: Mapping[str, Any]) -> dict[str, Any]:
    """What the function says of one answer."""
    try:
        reward = function(call["prompt"], call["completion"], **call["columns"])
    except Exception as error:  # the user's code may raise anything
        return {"error": f"raises {type(error).__name__}: {error}"}
    if reward is None:
        return {"reward": None}
    if not isinstance(reward, numbers.Real):
        return {"error": f"returns a {type(reward).__name__}, not a number"}
    if not math.isfinite(reward):
        return {"error": f"returns {float(reward)}"}
    return {"reward": float(reward)}


def function_of(settings: Mapping[str, Any]) -> Callable[..., Any]:
    """The function, which is called with prompt, completion and columns; `settings`: see `process.py`.

    Columns with the names of a user's own first two parameters are left out, unless those are positional only.
    """
    if settings["file"] is None:
        score = named(settings)
        return lambda prompt, completion, /, **columns: score(completion, columns)
    spec = importlib.util.spec_from_file_location(_MODULE, settings["file"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # dataclasses and pickle look there
    spec.loader.exec_module(module)
    found: Callable[..., Any] = getattr(module, settings["function"])
    first = list(inspect.signature(found).parameters.values())[:2]
    taken = {parameter.name for parameter in first if parameter.kind is not parameter.POSITIONAL_ONLY}
    return lambda prompt, completion, /, **columns: found(
        prompt, completion, **{name: value for name, value in columns.items() if name not in taken}
    )


def main() -> None:
    die_with_parent(int(sys.argv[1]), signal.SIGKILL)
    # programs that the function starts inherit what is left in place of both
    calls, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def say(value: Mapping[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        function = function_of(json.loads(calls.readline()))
    except Exception as error:  # likewise
        say({"error": f"cannot be loaded: {type(error).__name__}: {error}"})
        return
    say({})
    for line in calls:
        say(answer(function, json.loads(line)))


if __name__ == "__main__":
    main()
