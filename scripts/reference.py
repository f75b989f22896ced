"""Generate run-file.md, commands.md, the keys in cluster.md and the tables of engines.md and parallelism.md in docs/.

A test fails when they are out of date.

python scripts/reference.py
"""

from collections.abc import Mapping
from pathlib import Path

import cluster_keys
import command_reference
import keys
import memory_table
import what_works
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hyperpod_ft.config import run_file as runfile
from hyperpod_ft.config import yaml_text
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.trl.settings import SETTINGS, Values

DOCS = Path(__file__).resolve().parent.parent / "docs"


def run_file() -> str:
    """The run file's keys, a list for each section."""
    lines = [
        "# The run file",
        "",
        "One YAML file describes a run ([an example](../README.md)). `hyperpod-ft init` writes one that fits your",
        "instances.",
        "",
        "`--set section.key=value` overrides a key on the command line; the value is YAML. Relative paths start at the",
        "run file's directory, or at the working directory if you name a recipe. Unknown keys are refused.",
        "",
        "Each key is shown with its default; keys without one are unset or required. Parentheses after a key have the",
        "other allowed values, if the text does not name them, and the engine, if only one has the key.",
        "",
        "## Recipes",
        "",
        "`hyperpod-ft init RECIPE` copies a recipe to `run.yaml`.",
        "",
        "| recipe | model | method | engine | instances |",
        "|---|---|---|---|---|",
        *(_recipe(name, path) for name, path in runfile.recipes().items()),
        "",
    ]
    return keys.linked("\n".join([*lines, *_sections(RunConfig)]))


def _recipe(name: str, path: Path) -> str:
    """A row of the table; the model as the recipe names it."""
    config = runfile.validate(yaml_text.read(path.read_text(encoding="utf-8"), name), name)
    method = {"lora": "LoRA", "full": "full"}[config.training.method]
    if config.training.objective != "sft":
        objective = config.training.objective
        method += f", {objective if len(objective) > 4 else objective.upper()}"
    cluster = config.cluster
    instances = cluster.instance_type if cluster.nodes == 1 else f"{cluster.nodes} x {cluster.instance_type}"
    if cluster.instance_type == "local":
        instances = "this machine"
    if config.sagemaker:
        instances += ", training job"
    return f"|`{name}`|{config.model.source}|{method}|`{config.engine}`|{instances}|"


def _sections(model: type[BaseModel]) -> list[str]:
    sections = {name: field for name, field in model.model_fields.items() if keys.section(field)}
    plain = {name: field for name, field in model.model_fields.items() if name not in sections}
    lines = ["## Top level", "", *_keys(plain)]
    for name, field in sections.items():
        section = keys.section(field)
        assert section is not None
        many = " A list." if keys.is_list(field) else ""
        lines += _described(name, section, many)
    return [*lines, *_trl()]


def _described(
    name: str, section: type[BaseModel], many: str = "", seen: frozenset[tuple[str, str | None]] = frozenset()
) -> list[str]:
    """A section's keys, then those of the sections in it; keys that were `seen` with the same text are not repeated."""
    inner = {key: found for key, field in section.model_fields.items() if (found := keys.section(field))}
    plain = {key: field for key, field in section.model_fields.items() if key not in inner}
    new = {key: field for key, field in plain.items() if field.description and (key, field.description) not in seen}
    lines = [f"## `{name}`", "", (section.__doc__ or "") + many, "", *(_keys(new) if new else ())]
    seen |= {(key, field.description) for key, field in plain.items()}
    for key, found in inner.items():
        lines += _described(f"{name}.{key}", found, seen=seen)
        seen |= {(key, field.description) for key, field in found.model_fields.items()}
    return lines


def _trl() -> list[str]:
    """The settings of section `trl`, by the objectives that have them alike."""
    kinds: dict[tuple[str, ...], dict[str, Values]] = {}
    for name, values in (setting for settings in SETTINGS.values() for setting in settings.items()):
        alike = tuple(objective for objective, settings in SETTINGS.items() if settings.get(name) == values)
        kinds.setdefault(alike, {})[name] = values
    return [
        "## `trl`",
        "",
        "Settings of TRL's trainers ([what they mean](https://huggingface.co/docs/trl)), by the objectives that have",
        "them. `plan` refuses all others.",
        "",
        *(
            f"- {_objectives(alike)}: {', '.join(_setting(name, of) for name, of in known.items())}"
            for alike, known in kinds.items()
        ),
        "",
    ]


def _objectives(names: tuple[str, ...]) -> str:
    return "Every objective" if len(names) == len(SETTINGS) else ", ".join(f"`{name}`" for name in names)


def _setting(name: str, values: Values) -> str:
    """A setting with what it may be: one of some names, a list of them, or a mapping of some keys."""
    if isinstance(values, list):
        return f"{_setting(name, values[0])} in a list"
    if isinstance(values, tuple):
        return f"`{name}` ({', '.join(f'`{value}`' for value in values)})"
    if isinstance(values, Mapping):
        return f"`{name}` (with {', '.join(_setting(*inner) for inner in values.items())})"
    return f"`{name}`"


def _keys(fields: dict[str, FieldInfo]) -> list[str]:
    return [*(keys.line(name, field) for name, field in fields.items()), ""]


def pages() -> dict[Path, str]:
    """The generated pages by path."""
    parallelism, cluster, engines = DOCS / "parallelism.md", DOCS / "cluster.md", DOCS / "engines.md"
    return {
        DOCS / "run-file.md": run_file(),
        cluster: cluster_keys.document(cluster.read_text(encoding="utf-8")),
        DOCS / "commands.md": command_reference.page(),
        engines: what_works.document(engines.read_text(encoding="utf-8")),
        parallelism: memory_table.document(parallelism.read_text(encoding="utf-8")),
    }


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
        print(page)
