"""JSON schemas of answers. jsonschema is imported only where a reward has one: a head node may not have it."""

from collections.abc import Iterator, Mapping
from typing import Any

from hyperpod_ft.errors import first_sentence


def validator(schema: Mapping[str, Any]) -> Any:
    """jsonschema's validator, of the draft that the schema names, else of 2020-12. It fetches no reference."""
    from jsonschema import Draft202012Validator, validators  # noqa: PLC0415
    from referencing import Registry  # noqa: PLC0415

    return validators.validator_for(schema, default=Draft202012Validator)(schema, registry=Registry())


def problem(schema: Mapping[str, Any]) -> str:
    """What is wrong with a schema; empty if nothing is, or jsonschema is not installed here."""
    try:
        from jsonschema import SchemaError  # noqa: PLC0415
        from referencing import Registry, Resource, exceptions  # noqa: PLC0415
        from referencing.jsonschema import DRAFT202012  # noqa: PLC0415
    except ModuleNotFoundError:
        return ""
    try:
        validator(schema).check_schema(schema)
        root = Resource.from_contents(schema, default_specification=DRAFT202012)
        resolver = Registry().resolver_with_root(root)
        for reference in _references(schema):
            resolver.lookup(reference)
    except SchemaError as error:
        return f"is not a JSON schema: {error.json_path}: {first_sentence(error)}"
    except exceptions.Unresolvable as error:
        return f"its reference {error.ref} leads to nothing in it"
    return ""


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(found := value.get("$ref"), str):
            yield found
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _references(each)
