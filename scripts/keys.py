"""The keys of a YAML file's section as lines of Markdown; scripts/reference.py and cluster_keys.py list them."""

import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def line(name: str, field: FieldInfo) -> str:
    """A key with its default, in brackets what it may be besides, and its meaning."""
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    key = f"`{name}`" if default in (None, (), {}) else f"`{name}: {_yaml(default)}`"
    others = [f"`{choice}`" for choice in _choices(field.annotation) if choice != default]
    facts = [] if all(other in f"{field.description}" for other in others) else others
    if is_list(field):
        facts.insert(0, "list")
    if default is None and _bare(field.annotation) is bool:
        facts.append("true or false")
    if field.is_required():
        facts.append("required")
    brackets = f" ({', '.join(facts)})" if facts else ""
    return f"- {key}{brackets}: {field.description}"


def section(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a key is, or each item of its list; None for a plain key."""
    annotation = _bare(field.annotation)
    if get_origin(annotation) is tuple:
        annotation = get_args(annotation)[0]
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def is_list(field: FieldInfo) -> bool:
    return get_origin(_bare(field.annotation)) is tuple


def _yaml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _choices(annotation: Any) -> tuple[Any, ...]:
    """Those of a Literal, also in a list of them and without `| None`."""
    annotation = _bare(annotation)
    if get_origin(annotation) is tuple:
        annotation = get_args(annotation)[0]
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _bare(annotation: Any) -> Any:
    """The type without `| None` and the metadata of Annotated."""
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    return get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation
