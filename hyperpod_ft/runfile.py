"""From YAML on disk to a resolved RunConfig: parse, override, validate, resolve."""

import difflib
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hyperpod_ft import sources
from hyperpod_ft.config import RunConfig, holds_secret
from hyperpod_ft.errors import ConfigError, UserError

RECIPES = Path(__file__).resolve().parent / "recipes"


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


def recipes() -> dict[str, Path]:
    """The packaged recipes by name."""
    return {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would not read back as text."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def dump(config: RunConfig) -> str:
    """A run file that `parse` and `validate` read back as the same config."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def find(reference: str) -> Path:
    """A run file by path, or a recipe by name. Raises UserError when it is neither."""
    path = Path(reference)
    if path.is_file():
        return path
    if reference in recipes():
        return recipes()[reference]
    raise UserError(
        f"{reference}: no such run file" + _did_you_mean(reference, recipes()),
        f"`hyperpod-ft init RECIPE` writes one; recipes: {', '.join(recipes())}",
    )


def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, override (`a.b=value`, the value in YAML), validate and resolve a run file.

    Relative paths in a user's file start at that file's directory, in a packaged recipe at the working directory.
    Raises UserError or ConfigError.
    """
    values = parse(path)
    for override in overrides:
        _override(values, override)
    base = Path.cwd() if path.resolve().parent == RECIPES else path.resolve().parent
    where = f"{path} with --set" if overrides else str(path)
    return resolve(validate(values, where), base)


def parse(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}", "give a readable YAML file") from error
    values = _yaml(text, str(path))
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds no keys", "start from `hyperpod-ft init`")
    return values


def _yaml(text: str, where: str) -> Any:
    try:
        values = yaml.load(text, _Loader)  # noqa: S506 - derives from SafeLoader
        json.dumps(values)  # dates, binary and sets are no values of a run file, nor are loops
        return values
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{where}{line}: {error.problem or error.context}", "correct the YAML") from error
    # PyYAML's constructors of explicit tags raise whatever they come across
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{where}: {error}", "correct the YAML") from error


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise UserError(f"--set {override}: not of the form key.key=value", "for example --set training.epochs=1")
    *parents, last = key.split(".")
    section = values
    for parent in parents:
        below = section.setdefault(parent, {})
        if not isinstance(below, dict):
            raise UserError(f"--set {key}: {parent} is no section", "see docs/run-file.md for the keys")
        section = below
    section[last] = _yaml(text, f"--set {key}")


def validate(values: dict[str, Any], where: str) -> RunConfig:
    """A RunConfig from plain values. Raises ConfigError with a line for each problem, keys with did-you-mean."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError([_describe(where, problem) for problem in error.errors()]) from error


def _describe(where: str, problem: ErrorDetails) -> str:
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location)
    match problem["type"]:
        case "extra_forbidden":
            known = _keys_at(location[:-1])
            return f"{where}: {key}: unknown key" + (
                _did_you_mean(location[-1], known) or f"; known: {', '.join(known)}"
            )
        case "missing":
            return f"{where}: {key}: is missing; add it (docs/run-file.md)"
        case "string_pattern_mismatch":
            return f"{where}: {key}: {problem['input']!r} does not match {problem['ctx']['pattern']}"
        case "tuple_type":
            return f"{where}: {key}: is not a list; write it in brackets, as [a, b]"
        case _:
            message = problem["msg"].removeprefix("Value error, ")
            secret = isinstance(problem["input"], dict) or holds_secret(str(problem["input"]))
            given = "" if secret else f" (given: {problem['input']!r})"
            return f"{where}: {key}: {message}{given}" if key else f"{where}: {message}"


def _keys_at(location: Iterable[str]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for part in location:
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def resolve(config: RunConfig, base: Path) -> RunConfig:
    """Make every path absolute and pin every source, so that the result means the same anywhere on the volume.

    Reads local sources (to digest them); idempotent on what it returns.
    """
    model = sources.resolve("model.source", config.model.source, config.model.revision, base)
    dataset = sources.resolve("dataset.source", config.dataset.source, config.dataset.revision, base)
    python = config.env.python
    if python == "current":
        python = sys.executable
    elif python is not None:
        # not resolve(): a virtual environment's interpreter is a link, and following it leaves the environment
        python = str((base / Path(python).expanduser()).absolute())
    root = (base / Path(config.cluster.root).expanduser()).resolve()
    values = config.model_dump()
    values["cluster"]["root"] = str(root)
    values["env"]["python"] = python
    values["model"] |= {"source": model.source, "revision": model.revision or None}
    values["dataset"] |= {"source": dataset.source, "revision": dataset.revision or None}
    return validate(values, "resolved run file")
