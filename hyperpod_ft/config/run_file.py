"""A run file on disk to a resolved RunConfig: parse, override, validate, resolve."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyperpod_ft.config import engine_choice, prompt_images, reward_signature, sources, yaml_file
from hyperpod_ft.config.fields import shortened
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sections.results import Eval
from hyperpod_ft.config.sections.rewards import Reward
from hyperpod_ft.config.yaml_file import FileKind
from hyperpod_ft.errors import UserError, did_you_mean
from hyperpod_ft.shipped import PACKAGE

RECIPES = PACKAGE / "recipes"
RUN_FILE = FileKind(RunConfig, "docs/run-file.md", "hyperpod-ft init")


def recipes() -> dict[str, Path]:
    """The packaged recipes by name."""
    return {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}


def find(reference: str) -> Path:
    """The path of a run file, given its path or a recipe's name. Raises UserError when there is neither."""
    path = Path(reference)
    if sources.exists(path) and path.is_file():
        return path
    if reference in recipes():
        return recipes()[reference]
    raise UserError(
        f"{shortened(reference)}: no such run file" + did_you_mean(reference, recipes()),
        f"`hyperpod-ft init RECIPE` writes one; recipes: {', '.join(recipes())}",
    )


def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, override (`a.b=value`, the value in YAML), validate and resolve a run file.

    Paths in a user's file are relative to its directory, those in a packaged recipe to the working directory.
    Raises UserError or ConfigError.
    """
    values = yaml_file.parse(RUN_FILE, path)
    for override in overrides:
        yaml_file.override(RUN_FILE, values, override)
    base = Path.cwd() if path.resolve().parent == RECIPES else path.resolve().parent
    where = f"{path} with --set" if overrides else str(path)
    return resolve(validate(values, where), base)


def overridden(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """A resolved run file with other values (`a.b=value`), which are not resolved. Raises UserError or ConfigError."""
    values = config.model_dump(mode="json")
    for override in overrides:
        yaml_file.override(RUN_FILE, values, override)
    return validate(values, "--set")


def open_frozen(path: Path) -> RunConfig:
    """The config of a resolved run file, as `yaml_text.dump` wrote it."""
    return validate(yaml_file.parse(RUN_FILE, path, limited=False), str(path))


def validate(values: Mapping[str, Any], where: str) -> RunConfig:
    """A RunConfig from plain values. Raises ConfigError with a line for each problem."""
    return yaml_file.validate(RUN_FILE, values, where)


def resolve(config: RunConfig, base: Path) -> RunConfig:
    """Make every path absolute, pin every source and name the engine: the result does not depend on where it is read.

    Reads local sources to digest them. Resolving the result again changes nothing.
    """
    root = (base / Path(config.cluster.root).expanduser()).resolve()
    values = engine_choice.with_engine(config).model_dump()
    values["cluster"]["root"] = str(root)
    for section in ("env", "tracking"):
        values[section]["python"] = _interpreter(values[section]["python"], base)
    adapter = ("model.adapter",) if config.model.adapter else ()
    teacher = ("teacher",) if config.teacher else ()
    for key in ("model", *adapter, *teacher, *(part.key for part in config.dataset.parts)):
        given = _section(values, key)
        pinned = sources.resolve(f"{key}.source", given["source"], given["revision"], base)
        given |= {"source": pinned.source, "revision": pinned.revision or None}
    for number, reward in enumerate(config.reward):
        values["reward"][number].update(_resolve_reward(f"reward.{number}", reward, base))
    if config.dataset.images:
        numbered = enumerate(config.generate.prompts)
        found = [prompt_images.pinned(prompt, f"generate.prompts.{number}", base) for number, prompt in numbered]
        values["generate"]["prompts"] = found
    if config.eval:
        values["eval"] |= _resolve_evaluation(config.eval, base)
    return validate(values, "resolved run file")


def _resolve_reward(key: str, reward: Reward, base: Path) -> dict[str, Any]:
    if reward.file is None:
        return {}
    pinned = sources.resolve_path(f"{key}.function", reward.file, f"{key}.revision", reward.revision, base)
    reward_signature.check(f"{key}.function", Path(pinned.source), reward.function_name)
    return {"function": f"{pinned.source}:{reward.function_name}", "revision": pinned.revision}


def _section(values: dict[str, Any], key: str) -> dict[str, Any]:
    """The section at a key such as `dataset.sources.0`."""
    found: Any = values
    for part in key.split("."):
        found = found[int(part) if part.isdigit() else part]
    section: dict[str, Any] = found
    return section


def with_evaluation(config: RunConfig, section: Mapping[str, Any], base: Path) -> RunConfig:
    """A resolved run file with another section `eval`; its relative paths are relative to `base`.

    Nothing else is resolved again: the local files that a finished run was made from may have changed since.
    """
    values = config.model_dump() | {"eval": dict(section)}
    given = validate(values, "hyperpod-ft eval").eval
    assert given is not None
    values["eval"] = given.model_dump() | _resolve_evaluation(given, base)
    return validate(values, "hyperpod-ft eval")


def _interpreter(python: str | None, base: Path) -> str | None:
    """`current` is the one that runs this program."""
    if python is None:
        return None
    # not resolve(): a virtual environment's interpreter is a link to one outside the environment
    return sys.executable if python == "current" else str((base / Path(python).expanduser()).absolute())


def _resolve_evaluation(given: Eval, base: Path) -> dict[str, Any]:
    values: dict[str, Any] = {"python": _interpreter(given.python, base)}
    if given.include_path is not None:
        key = "eval.include_path"
        tasks = sources.resolve_path(key, given.include_path, "eval.include_revision", given.include_revision, base)
        if not Path(tasks.source).is_dir():
            raise UserError(
                f"{key}: {shortened(tasks.source)} is not a directory", "give the directory of its YAML files"
            )
        values |= {"include_path": tasks.source, "include_revision": tasks.revision}
    return values
