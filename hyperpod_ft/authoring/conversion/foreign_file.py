"""A configuration file of another tool: its values, and what becomes of each of its keys.

Every key ends up in the run file, or with a reason in `changes` or `housekeeping`. Values are never repeated in
reasons: a key that this kit does not know may hold anything.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyperpod_ft.authoring.conversion.housekeeping import reason_of
from hyperpod_ft.authoring.draft import Draft
from hyperpod_ft.config import sources, yaml_text
from hyperpod_ft.config.fields import shortened
from hyperpod_ft.config.secrets import is_secret
from hyperpod_ft.config.sections.inputs import SPLIT
from hyperpod_ft.errors import UserError, did_you_mean, printable

_SECRET = re.compile(r"(^|_)(token|api_?key|secret|password|credentials?|access_key(_id)?)$", re.IGNORECASE)
GIVE_DATASET = "give one with --dataset"
ANY_NUMBER = 1_000_000_000  # of rows
_ENDS = ("embed_tokens", "lm_head")
_WORDS = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}


@dataclass
class Conversion:
    """The run file made of another tool's file, and the keys of that file that are not in it, or not as they were."""

    draft: Draft
    values: Mapping[str, Any]  # of the other file
    file: Path
    dataset: str | None = None  # --dataset takes the place of the file's
    format: str | None = None  # --format
    changes: dict[str, str] = field(default_factory=dict)  # what changes the training: why, by key
    housekeeping: dict[str, str] = field(default_factory=dict)  # what does not

    def left(self) -> dict[str, list[str]]:
        """What is not in the run file, or not as it was: a line for each reason, by heading."""
        found = {"Changes your training:": self.changes, "Housekeeping, not converted:": self.housekeeping}
        return {heading: _by_reason(reasons) for heading, reasons in found.items() if reasons}

    def find(self, path: str) -> Path | None:
        """What a relative path of the file means. These tools take it from where they are started, which is seldom
        where the file is: also tried are the file's directory and those above it.
        """
        bases = (Path.cwd(), *self.file.absolute().parents)
        return next((base / path for base in bases if sources.exists(base / path)), None)

    def listed_datasets(self, key: str) -> list[Mapping[str, Any]]:
        """The datasets of a list. Raises UserError unless each has a path or a Hub id."""
        entries = self.values.get(key)
        if not isinstance(entries, list) or not entries or not all(isinstance(one, dict) for one in entries):
            raise UserError(f"{key}: names no dataset", GIVE_DATASET)
        for number, entry in enumerate(entries):
            if entry.get("path") in ("json", "csv", "parquet", "arrow", "text"):
                raise UserError(f"{key}[{number}].path: is a kind of file", GIVE_DATASET)
        return entries

    def set_sources(self, described: Sequence[Mapping[str, Any]]) -> None:
        """Set the sources of the data, each by its keys of section dataset; --format takes the place of formats."""
        formats = ("format", "prompt_template", "completion_template")
        kept = [{key: value for key, value in one.items() if not (self.format and key in formats)} for one in described]
        if len(kept) == 1:
            for key, value in kept[0].items():
                self.draft.set(f"dataset.{key}", value)
        else:
            self.draft.set("dataset.sources", kept)

    def split(self, key: str, split: str) -> dict[str, str]:
        """The key for the part of a dataset that is used, a split or a slice of one; none for `train`, the default."""
        if split == "train":
            return {}
        if re.fullmatch(SPLIT, split, re.ASCII):
            return {"split": split}
        self.changes[key] = "dataset.split takes one split, or a slice of one; all of `train` is used"
        return {}

    def set_target_modules(self, key: str, value: Any) -> None:
        """Set the modules that have adapters: names, or what stands for all linear layers."""
        names = [str(name) for name in value] if isinstance(value, list) else re.split(r"[\s,]+", str(value).strip())
        if names in (["all"], ["all-linear"]):
            return
        if all(re.fullmatch(r"[\w.-]+", name, re.ASCII) for name in names):
            self.draft.set("lora.target_modules", names)
        else:
            self.changes[key] = (
                "is a regular expression, and the run adapts all linear layers: name modules in lora.target_modules"
            )

    def set_target_parameters(self, key: str) -> None:
        """Set the parameters of all experts that have adapters."""
        given = self.values.get(key)
        if not is_unset(given):
            self.draft.set(
                "lora.target_parameters", [str(name) for name in (given if isinstance(given, list) else [given])]
            )

    def set_new_tokens(self, plain: Any, special: Any) -> None:
        """Set the tokens to add."""
        for key, given in (("new_tokens", plain), ("new_special_tokens", special)):
            if not is_unset(given):
                self.draft.set(f"model.{key}", _names(given))

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


def _by_reason(reasons: Mapping[str, str]) -> list[str]:
    keys: dict[str, list[str]] = {}
    for key, reason in reasons.items():
        # names of keys may hold sequences that control a terminal, and line breaks
        keys.setdefault(reason, []).append(printable(key))
    return [f"  {', '.join(names)}: {reason}" for reason, names in keys.items()]


# What becomes of a key: it may set keys of the draft, or put the key into `changes` or `housekeeping`.
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
    """One of the values that have a counterpart; of any other, the one that it begins with, and the reason is noted."""

    def rule(conversion: Conversion, key: str) -> None:
        value = str(conversion.values[key])
        if value not in values:
            conversion.changes[key] = otherwise
            value = value.partition("_")[0]
        if value in values:
            conversion.draft.set(to, values[value])

    return rule


def changes(reason: str) -> Rule:
    """A key that has no counterpart, without which the training is another."""

    def rule(conversion: Conversion, key: str) -> None:
        conversion.changes[key] = reason

    return rule


def only(value: Any, reason: str) -> Rule:
    """A key that has one value in the kit; with any other, the training is another."""

    def rule(conversion: Conversion, key: str) -> None:
        if (conversion.values[key] if isinstance(value, str) else conversion.number(key)) != value:
            conversion.changes[key] = reason

    return rule


def housekeeping(reason: str) -> Rule:
    """A key that changes nothing about the training."""

    def rule(conversion: Conversion, key: str) -> None:
        conversion.housekeeping[key] = reason

    return rule


def whole_modules(conversion: Conversion, key: str) -> None:
    """Modules that are trained whole beside the adapters."""
    names = _names(conversion.values[key])
    if set(names).issubset(_ENDS):
        conversion.draft.set("lora.modules_to_save", names)
    else:
        conversion.changes[key] = (
            "set lora.modules_to_save to the embedding and the output layer; the kit trains no other whole"
        )


def _names(value: Any) -> list[str]:
    """Of a list, or of text with commas between."""
    return [str(name).strip() for name in (value if isinstance(value, list) else str(value).split(","))]


def used(_: Conversion, __: str) -> None:
    """A key that another rule, or the end of the conversion, reads."""


def is_unset(value: Any) -> bool:
    """Whether a value switches nothing on. 0 is a value."""
    return value is None or value is False or value in ("", "none", "None", [], {})


def convert_keys(conversion: Conversion, rules: Mapping[str, Rule]) -> None:
    """Apply the rule of each key. A key that is off or empty changes nothing, unless it is unknown and may be on by
    default: what is unknown may change the training.
    """
    for key, value in conversion.values.items():
        if any(is_secret("", one) for one in _strings(value)) or (key not in rules and _SECRET.search(key)):
            if not is_unset(value):
                conversion.housekeeping[key] = "may be a secret and was not copied; export it in the shell that submits"
        elif rule := rules.get(key):
            if not is_unset(value):
                rule(conversion, key)
        elif reason := reason_of(key):
            if not is_unset(value):
                conversion.housekeeping[key] = reason
        elif value is False or not is_unset(value):
            conversion.changes[key] = "unknown key" + did_you_mean(key, rules)


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
