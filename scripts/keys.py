"""The keys of a YAML file's section as lines of Markdown; scripts/reference.py and cluster_keys.py list them."""

import re
import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

_ENGINE = re.compile(r" \(engine (torch|neuron|trl)(?:; ([^()]+))?\)")  # whose key it is, beside a page
_PAGE = re.compile(r"\bdocs/([a-z0-9-]+)\.md(#[a-z0-9-]+)?")


def linked(text: str) -> str:
    """A text with links to the pages that error messages and run files name by their paths."""
    return _PAGE.sub(lambda page: f"[{page[1].replace('-', ' ')}]({page[1]}.md{page[2] or ''})", text)


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
    meaning = field.description or ""
    # not where only a value is, which begins a sentence of its own
    if (engine := _ENGINE.search(meaning)) and not re.search(r"(^|\. )`", meaning[: engine.start()]):
        facts.append(f"engine `{engine[1]}`")
        meaning = meaning.replace(engine[0], f" ({engine[2]})" if engine[2] else "", 1)
    brackets = f" ({', '.join(facts)})" if facts else ""
    return f"- {key}{brackets}: {meaning}"


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
