"""A configuration file of another tool: its values, and what becomes of each of its keys.

Every key ends up in the run file or in `left`, with the reason. Values are never repeated in reasons: a key that this
kit does not know may hold anything.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyperpod_ft.authoring.draft import Draft
from hyperpod_ft.config import yaml_text
from hyperpod_ft.config.fields import shortened
from hyperpod_ft.config.secrets import holds_secret
from hyperpod_ft.errors import UserError, did_you_mean

_SECRET = re.compile(r"(^|_)(token|api_?key|secret|password|credentials?|access_key(_id)?)$", re.IGNORECASE)
_WORDS = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}


@dataclass
class Conversion:
    """The run file made of another tool's file, and the keys of that file that are not in it."""

    draft: Draft
    values: Mapping[str, Any]  # of the other file
    directory: Path  # that its relative paths begin at
    left: dict[str, str] = field(default_factory=dict)  # why, by key

    def is_on(self, key: str) -> bool:
        """Whether a switch is on: PyYAML, which these tools read with, also takes yes and no for switches."""
        value = self.values.get(key)
        return _WORDS.get(value.lower(), True) if isinstance(value, str) and value else bool(value)

    def number(self, key: str, default: float | None = None) -> Any:
        """A number, also one that YAML 1.1 reads as text, as 1e-5. Raises UserError for anything else."""
        value = self.values.get(key)
        if value is None or value == "":
            return default
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                value = None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UserError(f"{key}: is not a number", "correct it in the file that is converted")
        return int(value) if float(value).is_integer() and abs(value) >= 1 else float(value)


# What becomes of a key: it may set keys of the draft, or put the key into `left`.
Rule = Callable[[Conversion, str], None]


def number(to: str, note: str = "") -> Rule:
    """A number that means the same in both files."""

    def rule(conversion: Conversion, key: str) -> None:
        conversion.draft.set(to, conversion.number(key), note)

    return rule


def text(to: str) -> Rule:
    """A string that means the same in both files."""

    def rule(conversion: Conversion, key: str) -> None:
        conversion.draft.set(to, str(conversion.values[key]))

    return rule


def switch(to: str, value: Any = True) -> Rule:
    """A switch that sets a key when it is on."""

    def rule(conversion: Conversion, key: str) -> None:
        if conversion.is_on(key):
            conversion.draft.set(to, value)

    return rule


def choice(to: str, values: Mapping[str, Any], otherwise: str) -> Rule:
    """One of the values that have a counterpart; any other is left, with the reason `otherwise`."""

    def rule(conversion: Conversion, key: str) -> None:
        value = str(conversion.values[key])
        if value not in values:
            conversion.left[key] = otherwise
        elif values[value] is not None:
            conversion.draft.set(to, values[value])

    return rule


def left(reason: str) -> Rule:
    """A key that has no counterpart."""

    def rule(conversion: Conversion, key: str) -> None:
        conversion.left[key] = reason

    return rule


def used(_: Conversion, __: str) -> None:
    """A key that another rule, or the end of the conversion, reads."""


def is_unset(value: Any) -> bool:
    """Whether a value switches nothing on. 0 is a value."""
    return value is None or value is False or value in ("", "none", "None", [], {})


def convert_keys(conversion: Conversion, rules: Mapping[str, Rule]) -> None:
    """Apply the rule of each key. A key that is off or empty changes nothing, unless it is unknown."""
    for key, value in conversion.values.items():
        rule = rules.get(key)
        if _SECRET.search(key) or any(holds_secret(one) for one in _strings(value)):
            if not is_unset(value):
                conversion.left[key] = "may be a secret and was not copied; export it in the shell that submits"
        elif rule is None:
            conversion.left[key] = "unknown key" + did_you_mean(key, rules)
        elif not is_unset(value):
            rule(conversion, key)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _strings(one)
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one)


def read(path: Path) -> dict[str, Any]:
    """The values of the file. Raises UserError when it is not a YAML file of keys."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise UserError(f"{path}: {reason}", "give a YAML file of axolotl, LLaMA-Factory or TRL") from error
    values = yaml_text.read(content, str(path))
    if not isinstance(values, dict):
        raise UserError(f"{shortened(str(path))}: has no keys", "give a YAML file of axolotl, LLaMA-Factory or TRL")
    return values
