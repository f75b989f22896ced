"""Generate docs/run-file.md, docs/cluster-file.md, docs/commands.md and the table of docs/parallelism.md.

A test fails when they are out of date.

python scripts/reference.py
"""

import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import memory_table
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hyperpod_ft.cli.main import app
from hyperpod_ft.cluster.config import ClusterConfig
from hyperpod_ft.config import run_file as runfile
from hyperpod_ft.config import yaml_text
from hyperpod_ft.config.run_config import RunConfig

_LIMITS = (
    f"A file may have {yaml_text.MAX_CHARACTERS:,} characters, {yaml_text.MAX_NODES:,} keys and values (with aliases"
    f" expanded),\nand {yaml_text.MAX_DEPTH} levels of nesting."
)
DOCS = Path(__file__).resolve().parent.parent / "docs"


def run_file() -> str:
    """The run file's keys as Markdown tables, a section each."""
    lines = [
        "# The run file",
        "",
        "One YAML file describes a run. `--set section.key=value` overrides a key on the command line; the value is",
        "YAML. Relative paths are relative to the run file's directory. Unknown keys are refused.",
        _LIMITS,
        "Recipes to start from:",
        *[f"`{name}`{',' if name != list(runfile.recipes())[-1] else '.'}" for name in runfile.recipes()],
        "",
        "This page is generated from `hyperpod_ft/config/sections/` by `python scripts/reference.py`.",
        "",
    ]
    return "\n".join([*lines, *_sections(RunConfig)])


def cluster_file() -> str:
    """The cluster file's keys, likewise."""
    lines = [
        "# The cluster file",
        "",
        "One YAML file describes a HyperPod cluster; `hyperpod-ft cluster init` writes one to start from.",
        "`--set section.key=value` overrides a key on the command line; the value is YAML. Unknown keys are refused.",
        _LIMITS,
        "",
        "This page is generated from `hyperpod_ft/cluster/{config,sections}.py` by `python scripts/reference.py`.",
        "",
    ]
    return "\n".join([*lines, *_sections(ClusterConfig)])


def _sections(model: type[BaseModel]) -> list[str]:
    sections = {name: field for name, field in model.model_fields.items() if _section(field)}
    plain = {name: field for name, field in model.model_fields.items() if name not in sections}
    lines = ["## Top level", "", *_table(plain)]
    for name, field in sections.items():
        section = _section(field)
        assert section is not None
        many = " A list." if get_origin(_bare(field.annotation)) is tuple else ""
        lines += _described(name, section, many)
    return lines


def _described(name: str, section: type[BaseModel], many: str = "") -> list[str]:
    """A section's table, then those of the sections in it."""
    inner = {key: found for key, field in section.model_fields.items() if (found := _section(field))}
    plain = {key: field for key, field in section.model_fields.items() if key not in inner}
    lines = [f"## `{name}`", "", (section.__doc__ or "") + many, "", *_table(plain)]
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


def _table(fields: dict[str, FieldInfo]) -> list[str]:
    rows = ["| key | values | default | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        default = "required" if field.is_required() else f"`{_plain(field.get_default(call_default_factory=True))}`"
        rows.append(f"| `{name}` | {_values(field.annotation)} | {default} | {field.description} |")
    return [*rows, ""]


def _plain(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(list(value)) if isinstance(value, tuple) else str(value)


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


def commands() -> str:
    """Every command's help, as the terminal shows it."""
    lines = ["# Commands", "", "This page is generated by `python scripts/reference.py`.", ""]
    root = typer.main.get_command(app)
    for path, command in _walk(root, ["hyperpod-ft"]):
        context = typer.Context(
            command,
            info_name=" ".join(path),
            terminal_width=100,
            max_content_width=100,
            help_option_names=["-h", "--help"],
        )
        lines += [f"## `{' '.join(path)}`", "", "```", command.get_help(context).strip(), "```", ""]
    return "\n".join(lines)


def _walk(command: Any, path: list[str]) -> list[tuple[list[str], Any]]:
    found = [(path, command)]
    for name, below in getattr(command, "commands", {}).items():
        found += _walk(below, [*path, name])
    return found


def pages() -> dict[Path, str]:
    """The generated pages by path."""
    parallelism = DOCS / "parallelism.md"
    return {
        DOCS / "run-file.md": run_file(),
        DOCS / "cluster-file.md": cluster_file(),
        DOCS / "commands.md": commands(),
        parallelism: memory_table.document(parallelism.read_text(encoding="utf-8")),
    }


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
        print(page)
