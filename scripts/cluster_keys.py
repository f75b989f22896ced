"""The keys of the cluster file, as lists in docs/cluster.md; part of scripts/reference.py."""

from collections.abc import Iterator
from typing import Any

import keys
from pydantic import BaseModel

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
    sections = {name: model for name, field in ClusterConfig.model_fields.items() if (model := keys.section(field))}
    shared = InstanceGroup.model_fields.keys() - {"name", "instance_type"}
    yield from _list(ClusterConfig, sections)
    groups = [f"`{name}`" for name, model in sections.items() if issubclass(model, InstanceGroup)]
    yield from [f"{', '.join(groups)}, each an instance group:", ""]
    yield from _list(InstanceGroup, InstanceGroup.model_fields.keys() - shared)
    for name, model in sections.items():
        many = " A list." if keys.is_list(ClusterConfig.model_fields[name]) else ""
        yield from [f"`{name}`: {model.__doc__}{many}", ""]
        yield from _list(model, shared if issubclass(model, InstanceGroup) else ())


def _list(model: type[BaseModel], without: Any) -> list[str]:
    rows = [keys.line(name, field) for name, field in model.model_fields.items() if name not in without]
    return [*rows, ""]
