"""The keys of the cluster file, as lists in docs/cluster.md; part of scripts/reference.py."""

import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hyperpod_ft.cluster.config import ClusterConfig
from hyperpod_ft.cluster.sections import InstanceGroup

BEGIN, END = "<!-- keys: made by `python scripts/reference.py` -->", "<!-- end of the keys -->"


def document(text: str) -> str:
    """A page with the text between its markers generated again."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([f"{before}{BEGIN}", "", *_lines(), f"{END}{after}"])


def _lines() -> Iterator[str]:
    """The keys of the top level, then of each section; keys that every instance group has are listed once."""
    sections = {name: model for name, field in ClusterConfig.model_fields.items() if (model := _section(field))}
    shared = InstanceGroup.model_fields.keys() - {"name", "instance_type"}
    yield from _list(ClusterConfig, sections)
    groups = [f"`{name}`" for name, model in sections.items() if issubclass(model, InstanceGroup)]
    yield from [f"{', '.join(groups)}, each an instance group:", ""]
    yield from _list(InstanceGroup, InstanceGroup.model_fields.keys() - shared)
    for name, model in sections.items():
        many = " A list." if get_origin(_bare(ClusterConfig.model_fields[name].annotation)) is tuple else ""
        yield from [f"`{name}`: {model.__doc__}{many}", ""]
        yield from _list(model, shared if issubclass(model, InstanceGroup) else ())


def _list(model: type[BaseModel], without: Any) -> list[str]:
    rows = [_row(name, field) for name, field in model.model_fields.items() if name not in without]
    return [*rows, ""]


def _row(name: str, field: FieldInfo) -> str:
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    if field.is_required():
        key = f"`{name}` (required)"
    elif default in (None, (), {}):
        key = f"`{name}`"
    else:
        key = f"`{name}: {str(default).lower() if isinstance(default, bool) else default}`"
    others = [f"`{choice}`" for choice in _choices(field.annotation) if choice != default]
    shown = "" if all(other in f"{field.description}" for other in others) else f" ({', '.join(others)})"
    return f"- {key}{shown}: {field.description}"


def _choices(annotation: Any) -> tuple[Any, ...]:
    """Those of a Literal, also in a list of them and without `| None`."""
    annotation = _bare(annotation)
    if get_origin(annotation) is tuple:
        annotation = get_args(annotation)[0]
    return get_args(annotation) if get_origin(annotation) is Literal else ()


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
