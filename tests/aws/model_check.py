"""Whether a request is what a service's model allows: types, required fields, lengths, ranges, patterns and enums.

The models are botocore's; moto checks none of this, and botocore's own validator checks neither patterns nor enums:
a client learns of them only from the service, as here."""

import re
from collections.abc import Iterator
from typing import Any

from botocore.model import Shape

# Patterns are Java's; Python's re has no \p{...}.
_JAVA = {r"\p{L}": r"a-zA-Z\u00aa-\uffff", r"\p{N}": r"0-9", r"\p{Z}": r"\s"}
_PYTHON_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "long": int,
    "float": (int, float),
    "double": (int, float),
    "boolean": bool,
    "list": list,
    "map": dict,
    "structure": dict,
}


def violations(value: Any, shape: Shape, path: str = "") -> Iterator[str]:
    """Each violation in AWS's words: "Value 'x' at 'a.b' failed to satisfy constraint: Member must ..."."""
    expected = _PYTHON_TYPES.get(shape.type_name)
    if expected and (not isinstance(value, expected) or (isinstance(value, bool) and expected is int)):
        yield f"Value '{value}' at '{path}' is not a {shape.type_name}"
        return
    for rule in _broken(value, shape):
        yield f"Value '{value}' at '{path}' failed to satisfy constraint: {rule}"
    if shape.type_name == "structure":
        for name in shape.required_members:
            if name not in value:
                yield f"Value null at '{_join(path, name)}' failed to satisfy constraint: Member must not be null"
        for name, member in value.items():
            if name not in shape.members:
                yield f"Unknown parameter at '{_join(path, name)}'"
            else:
                yield from violations(member, shape.members[name], _join(path, name))
    elif shape.type_name == "list":
        for index, member in enumerate(value, 1):
            yield from violations(member, shape.member, f"{path}.{index}.member")
    elif shape.type_name == "map":
        for key, member in value.items():
            yield from violations(key, shape.key, f"{path}.{key}")
            yield from violations(member, shape.value, f"{path}.{key}")


def _broken(value: Any, shape: Shape) -> Iterator[str]:
    rules = shape.metadata
    if shape.type_name == "string":
        if enum := rules.get("enum"):
            if value not in enum:
                yield f"Member must satisfy enum value set: [{', '.join(enum)}]"
        elif (pattern := rules.get("pattern")) and not _matches(pattern, value):
            yield f"Member must satisfy regular expression pattern: {pattern}"
    if shape.type_name in ("string", "list", "map"):
        if len(value) < rules.get("min", 0):
            yield f"Member must have length greater than or equal to {rules['min']}"
        if len(value) > rules.get("max", len(value)):
            yield f"Member must have length less than or equal to {rules['max']}"
    if shape.type_name in ("integer", "long", "float", "double"):
        if value < rules.get("min", value):
            yield f"Member must have value greater than or equal to {rules['min']}"
        if value > rules.get("max", value):
            yield f"Member must have value less than or equal to {rules['max']}"


def _matches(pattern: str, value: str) -> bool:
    try:
        return bool(re.fullmatch(_python(pattern), value))
    except re.error:  # ranges of surrogates, which Python's re does not know
        return True


def _python(pattern: str) -> str:
    for java, python in _JAVA.items():
        pattern = pattern.replace(java, python)
    return pattern


def _join(path: str, name: str) -> str:
    name = name[0].lower() + name[1:]
    return f"{path}.{name}" if path else name
