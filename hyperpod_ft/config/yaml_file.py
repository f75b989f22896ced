"""YAML files that users write: parse, override keys, validate against a pydantic model; each problem is one line."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hyperpod_ft.config import yaml_text
from hyperpod_ft.config.fields import shortened, shown
from hyperpod_ft.config.secrets import holds_secret
from hyperpod_ft.errors import ConfigError, UserError, did_you_mean

Model = TypeVar("Model", bound=BaseModel)
_LISTED = 20  # problems of one file


@dataclass(frozen=True)
class FileKind(Generic[Model]):
    """A kind of file: its model, the page that lists its keys, and the command that writes one to start from."""

    model: type[Model]
    page: str
    start: str


def parse(kind: FileKind[Any], path: Path, *, limited: bool = True) -> dict[str, Any]:
    """The keys and values of a file, unchecked. Raises UserError. `limited` is as in `yaml_text.read`."""
    try:
        with path.open(encoding="utf-8") as stream:
            text = stream.read(yaml_text.MAX_CHARACTERS + 1 if limited else None)  # never all of /dev/zero
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}", f"give a readable YAML file, or start from `{kind.start}`"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text", "give a YAML file") from error
    values = yaml_text.read(text, str(path), limited=limited)
    if not isinstance(values, dict):
        raise UserError(f"{path}: has no keys", f"start from `{kind.start}`")
    return values


def override(kind: FileKind[Any], values: dict[str, Any], text: str) -> None:
    """Set a key from `a.b=value`, the value in YAML. Raises UserError."""
    key, equals, given = text.partition("=")
    if not equals or not all(key.split(".")):
        raise UserError(
            f"--set {shortened(text)}: not of the form key.key=value", "for example --set training.epochs=1"
        )
    *parents, last = key.split(".")
    section: Any = values
    for parent in parents:
        below = section.setdefault(parent, {}) if isinstance(section, dict) else section[_number(key, parent, section)]
        if not isinstance(below, (dict, list)):
            raise UserError(
                f"--set {shortened(key)}: {shortened(parent)} is not a section", f"see {kind.page} for the keys"
            )
        section = below
    place = last if isinstance(section, dict) else _number(key, last, section)
    section[place] = yaml_text.read(given, f"--set {shortened(key)}")


def _number(key: str, part: str, section: list[Any]) -> int:
    """The index of a list's item, from 0. Raises UserError if the list has no such item."""
    if re.fullmatch(r"[0-9]{1,4}", part, re.ASCII) and int(part) < len(section):
        return int(part)
    raise UserError(
        f"--set {shortened(key)}: {shortened(part)} is no number of an item, from 0; there are {len(section)}",
        "correct it, or set the whole list",
    )


def validate(kind: FileKind[Model], values: Mapping[str, Any], where: str) -> Model:
    """A config from plain values. Raises ConfigError with a line for each problem, keys with did-you-mean."""
    try:
        return kind.model.model_validate(values)
    except ValidationError as error:
        problems = error.errors()
        lines = [_describe(kind, where, problem) for problem in problems[:_LISTED]]
        if len(problems) > _LISTED:
            lines.append(f"{where}: {len(problems) - _LISTED:,} more problems; correct these first")
        raise ConfigError(lines) from error


def _describe(kind: FileKind[Any], where: str, problem: ErrorDetails) -> str:
    location = [str(part) for part in problem["loc"]]
    key, given = shortened(".".join(location), 70), shown(problem["input"])
    match problem["type"]:
        case "extra_forbidden":
            known = _keys_at(kind.model, location[:-1])
            return f"{where}: {key}: unknown key" + (
                did_you_mean(location[-1], known) or f"; known: {', '.join(known)}"
            )
        case "missing":
            return f"{where}: {key}: is missing; add it ({kind.page})"
        case "int_parsing" | "int_type" | "int_from_float" | "float_parsing" | "float_type":
            return f"{where}: {key}: must be a number (given: {given})"
        case "tuple_type":
            return f"{where}: {key}: is not a list; write it in brackets, such as [a, b]"
        case _:
            message = problem["msg"].removeprefix("Value error, ")
            secret = isinstance(problem["input"], dict) or holds_secret(str(problem["input"]))
            end = "" if secret else f" (given: {given})"
            return f"{where}: {key}: {message}{end}" if key else f"{where}: {message}"


def _keys_at(model: type[BaseModel], location: Iterable[str]) -> list[str]:
    for part in location:
        if part.isdigit():
            continue  # an element of a list; its section was found in the list's annotation
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        sections = [one for one in (annotation, *get_args(annotation)) if isinstance(one, type)]
        below = next((one for one in sections if issubclass(one, BaseModel)), None)
        if below is None:
            return []
        model = below
    return list(model.model_fields)
