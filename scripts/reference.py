"""Generate docs/run-file.md, docs/commands.md, the keys in docs/cluster.md and the table of docs/memory.md.

A test fails when they are out of date.

python scripts/reference.py
"""

import re
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import cluster_keys
import command_reference
import memory_table
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hyperpod_ft.config import run_file as runfile
from hyperpod_ft.config import yaml_text
from hyperpod_ft.config.run_config import RunConfig

_LIMITS = (
    f"A file may have {yaml_text.MAX_CHARACTERS:,} characters, {yaml_text.MAX_NODES:,} keys and values (with aliases"
    f" expanded),",
    f"and {yaml_text.MAX_DEPTH} levels of nesting.",
    "",
    "Each key is shown with its default, as in YAML. A key without one is not set, or marked as required.",
)
DOCS = Path(__file__).resolve().parent.parent / "docs"


def run_file() -> str:
    """The run file's keys, a list for each section."""
    lines = [
        "# The run file",
        "",
        "One YAML file describes a run. `--set section.key=value` overrides a key on the command line; the value is",
        "YAML. Relative paths are relative to the run file's directory. Unknown keys are refused.",
        *_LIMITS,
        "",
        f"Recipes to start from: {', '.join(f'`{name}`' for name in runfile.recipes())}.",
        "",
        "This page is generated from `hyperpod_ft/config/sections/` by `python scripts/reference.py`.",
        "",
    ]
    return "\n".join([*lines, *_sections(RunConfig)])


def _sections(model: type[BaseModel]) -> list[str]:
    sections = {name: field for name, field in model.model_fields.items() if _section(field)}
    plain = {name: field for name, field in model.model_fields.items() if name not in sections}
    lines = ["## Top level", "", *_keys(plain)]
    for name, field in sections.items():
        section = _section(field)
        assert section is not None
        many = " A list." if get_origin(_bare(field.annotation)) is tuple else ""
        lines += _described(name, section, many)
    return lines


def _described(name: str, section: type[BaseModel], many: str = "") -> list[str]:
    """A section's keys, then those of the sections in it."""
    inner = {key: found for key, field in section.model_fields.items() if (found := _section(field))}
    plain = {key: field for key, field in section.model_fields.items() if key not in inner}
    lines = [f"## `{name}`", "", (section.__doc__ or "") + many, "", *_keys(plain)]
    return lines + [line for key, found in inner.items() for line in _described(f"{name}.{key}", found)]


def _section(field: FieldInfo) -> type[BaseModel] | None:
    annotation = _bare(field.annotation)
    if get_origin(annotation) is tuple:
        annotation = get_args(annotation)[0]
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _bare(annotation: Any) -> Any:
    """The type without `| None` and the metadata of Annotated."""
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    return get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation


def _keys(fields: dict[str, FieldInfo]) -> list[str]:
    return [*(f"- {_key(name, field)}: {field.description}" for name, field in fields.items()), ""]


def _key(name: str, field: FieldInfo) -> str:
    """A key with its default, and in brackets which values it takes, unless default or description show that."""
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    values = _values(field.annotation)
    shown = type(default) is _bare(field.annotation) or isinstance(default, str)
    if "`" in values:
        shown = all(choice in (field.description or "") for choice in re.findall("`[^`]+`", values))
    facts = [*([] if shown else [values]), *(["required"] if field.is_required() else [])]
    key = f"`{name}`" if default is None else f"`{name}: {_plain(default)}`"
    return f"{key} ({', '.join(facts)})" if facts else key


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(value)}]"
    return str(value)


def _values(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if origin in (Union, types.UnionType):
        return " or ".join(_values(part) for part in get_args(annotation) if part is not type(None))
    if origin is tuple:
        return f"list of {_values(get_args(annotation)[0])}"
    if origin is dict:
        return "mapping"
    if hasattr(annotation, "__metadata__"):
        return _values(get_args(annotation)[0])
    return {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}.get(
        annotation.__name__, annotation.__name__
    )


def pages() -> dict[Path, str]:
    """The generated pages by path."""
    memory, cluster = DOCS / "memory.md", DOCS / "cluster.md"
    return {
        DOCS / "run-file.md": run_file(),
        cluster: cluster_keys.document(cluster.read_text(encoding="utf-8")),
        DOCS / "commands.md": command_reference.page(),
        memory: memory_table.document(memory.read_text(encoding="utf-8")),
    }


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
        print(page)
