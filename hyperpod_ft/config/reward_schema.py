"""JSON schemas of answers. jsonschema is imported only where a reward has one: a head node may not have it."""

from collections.abc import Mapping
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
        _resolve(root, Registry().resolver_with_root(root))
        validator(schema).is_valid({})
    except SchemaError as error:
        return f"is not a JSON schema: {error.json_path}: {first_sentence(error)}"
    except exceptions.Unresolvable as error:
        return f"its reference {error.ref} leads to nothing in it"
    except RecursionError:
        return "its references lead back to themselves"
    except Exception as error:  # what the check of a schema lets pass, such as $id: 5
        return f"is not a JSON schema: {first_sentence(error)}"
    return ""


def _resolve(resource: Any, resolver: Any) -> None:
    """Look up the references of a schema and its subschemas, but not in data, such as an enum's."""
    if isinstance(resource.contents, Mapping):
        for key in ("$ref", "$dynamicRef"):
            if isinstance(reference := resource.contents.get(key), str):
                resolver.lookup(reference)
    for below in resource.subresources():
        _resolve(below, resolver.in_subresource(below))
