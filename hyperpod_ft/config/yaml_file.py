"""YAML files that users write: parse, override keys, validate against a pydantic model, every problem in one line."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hyperpod_ft.config.fields import holds_secret
from hyperpod_ft.errors import ConfigError, UserError, did_you_mean

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Kind(Generic[Model]):
    """A kind of file: what it holds, the page with its keys, and the command that writes one to start from."""

    model: type[Model]
    page: str
    start: str


class _Loader(yaml.SafeLoader):
    """Scalars as YAML 1.2's core schema reads them, and no silent duplicates.

    PyYAML's 1.1 rules read 24:00:00 as 86400, 1e-4 as a string and `no` as false.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own name

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is no text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_SCALARS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "int": (r"[-+]?[0-9]+", "-+0123456789"),
    "float": (r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+0123456789."),
}
for _tag, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^({_pattern})$"), list(_first))


def _decimal(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))  # 1.1 would read 010 as octal


_Loader.add_constructor("tag:yaml.org,2002:int", _decimal)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would not read back as text."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def dump(config: BaseModel) -> str:
    """A text that `parse` and `validate` read back as the same config."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def parse(kind: Kind[Any], path: Path) -> dict[str, Any]:
    """The keys and values of a file, unchecked. Raises UserError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}", f"give a readable YAML file, or start from `{kind.start}`"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text", "give a YAML file") from error
    values = _yaml(text, str(path))
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds no keys", f"start from `{kind.start}`")
    return values


def _yaml(text: str, where: str) -> Any:
    try:
        values = yaml.load(text, _Loader)  # noqa: S506 - derives from SafeLoader
        json.dumps(values)  # dates, binary and sets are no values, nor are loops
        return values
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{where}{line}: {error.problem or error.context}", "correct the YAML") from error
    # PyYAML's constructors of explicit tags raise whatever they come across
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{where}: {error}", "correct the YAML") from error


def override(kind: Kind[Any], values: dict[str, Any], text: str) -> None:
    """Set a key from `a.b=value`, the value in YAML. Raises UserError."""
    key, equals, given = text.partition("=")
    if not equals or not all(key.split(".")):
        raise UserError(f"--set {text}: not of the form key.key=value", "for example --set training.epochs=1")
    *parents, last = key.split(".")
    section = values
    for parent in parents:
        below = section.setdefault(parent, {})
        if not isinstance(below, dict):
            raise UserError(f"--set {key}: {parent} is no section", f"see {kind.page} for the keys")
        section = below
    section[last] = _yaml(given, f"--set {key}")


def validate(kind: Kind[Model], values: Mapping[str, Any], where: str) -> Model:
    """A config from plain values. Raises ConfigError with a line for each problem, keys with did-you-mean."""
    try:
        return kind.model.model_validate(values)
    except ValidationError as error:
        raise ConfigError([_describe(kind, where, problem) for problem in error.errors()]) from error


def _describe(kind: Kind[Any], where: str, problem: ErrorDetails) -> str:
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location)
    match problem["type"]:
        case "extra_forbidden":
            known = _keys_at(kind.model, location[:-1])
            return f"{where}: {key}: unknown key" + (
                did_you_mean(location[-1], known) or f"; known: {', '.join(known)}"
            )
        case "missing":
            return f"{where}: {key}: is missing; add it ({kind.page})"
        case "string_pattern_mismatch":
            return f"{where}: {key}: {problem['input']!r} does not match {problem['ctx']['pattern']}"
        case "int_parsing" | "int_type" | "int_from_float" | "float_parsing" | "float_type":
            return f"{where}: {key}: must be a number (given: {problem['input']!r})"
        case "tuple_type":
            return f"{where}: {key}: is not a list; write it in brackets, as [a, b]"
        case _:
            message = problem["msg"].removeprefix("Value error, ")
            secret = isinstance(problem["input"], dict) or holds_secret(str(problem["input"]))
            given = "" if secret else f" (given: {problem['input']!r})"
            return f"{where}: {key}: {message}{given}" if key else f"{where}: {message}"


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
