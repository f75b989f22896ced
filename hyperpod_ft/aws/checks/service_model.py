"""Checks a request against the service's own model, without a client, credentials or network.

botocore ships the models but checks only names, types and minimal lengths; it leaves patterns, enums and ranges to the
service, which reports one violation at a time, and minutes later. This module reports all of them at once.
"""

import functools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from hyperpod_ft.errors import did_you_mean

_TYPES: dict[str, tuple[Any, str]] = {
    "string": (str, "a string"),
    "character": (str, "a string"),
    "integer": (int, "an integer"),
    "long": (int, "an integer"),
    "float": ((int, float), "a number"),
    "double": ((int, float), "a number"),
    "boolean": (bool, "true or false"),
    "list": ((list, tuple), "a list"),
    "map": (dict, "an object"),
    "structure": (dict, "an object"),
}
_SHOWN = 80  # characters of a value
# The models' patterns are Java's. Of the constructs that `re` lacks, the requests here meet one: Unicode categories, in
# the pattern of tags. `\w` also matches the underscore, which tags may hold; the spaces are those of category Z.
_CATEGORIES = {r"\p{L}": r"\w", r"\p{N}": r"\d", r"\p{Z}": " \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"}


class Violation(NamedTuple):
    """`path`: for example `InstanceGroups[1].InstanceType`; empty for the request itself."""

    path: str
    problem: str


def check_request(service: str, operation: str, request: dict[str, Any]) -> list[Violation]:
    """The violations of the model of `service` (botocore's name, for example `sagemaker`) in a request of `operation`.

    Raises botocore's UnknownServiceError or OperationNotFoundError.
    """
    shape = model(service).operation_model(operation).input_shape
    return [] if shape is None else list(_check(request, shape, ""))


@functools.cache
def model(service: str) -> Any:
    """botocore's ServiceModel."""
    from botocore.loaders import Loader  # noqa: PLC0415 - only here
    from botocore.model import ServiceModel  # noqa: PLC0415

    return ServiceModel(Loader().load_service_model(service, "service-2"), service)


def _check(value: Any, shape: Any, path: str) -> Iterator[Violation]:
    if shape.type_name not in _TYPES or getattr(shape, "is_document_type", False):
        return  # timestamps, blobs and free documents: botocore converts many types
    expected, words = _TYPES[shape.type_name]
    if value is None:
        yield Violation(path, "is null; omit it")
        return
    if not isinstance(value, expected) or (isinstance(value, bool) and shape.type_name != "boolean"):
        yield Violation(path, f"is {_shown(value)}, not {words}")
        return
    if shape.type_name == "structure":
        yield from _structure(value, shape, path)
    elif shape.type_name == "list":
        yield from _list(value, shape, path)
    elif shape.type_name == "map":
        yield from _map(value, shape, path)
    elif shape.type_name in ("string", "character"):
        yield from _string(value, shape, path)
    elif shape.type_name != "boolean":
        yield from _bounds(value, shape, path, "is", "")


def _structure(value: dict[str, Any], shape: Any, path: str) -> Iterator[Violation]:
    for name in shape.required_members:
        # botocore fills in idempotency tokens
        if name not in value and not shape.members[name].metadata.get("idempotencyToken"):
            yield Violation(_join(path, name), "is missing")
    if getattr(shape, "is_tagged_union", False) and len(value) != 1:
        given = ", ".join(sorted(value)) or "none"
        yield Violation(path, f"must have exactly one of {', '.join(shape.members)}; it has {given}")
    for name, member in value.items():
        if name in shape.members:
            yield from _check(member, shape.members[name], _join(path, name))
        else:
            hint = did_you_mean(name, shape.members) or f"; known: {', '.join(shape.members)}"
            yield Violation(_join(path, name), f"is unknown{hint}")


def _list(value: list[Any], shape: Any, path: str) -> Iterator[Violation]:
    yield from _bounds(len(value), shape, path, "has", " elements")
    for index, member in enumerate(value):
        yield from _check(member, shape.member, f"{path}[{index}]")


def _map(value: dict[str, Any], shape: Any, path: str) -> Iterator[Violation]:
    yield from _bounds(len(value), shape, path, "has", " keys")
    for key, member in value.items():
        yield from _check(key, shape.key, _join(path, str(key)))
        yield from _check(member, shape.value, _join(path, str(key)))


def _string(value: str, shape: Any, path: str) -> Iterator[Violation]:
    known = shape.metadata.get("enum", [])
    if known:
        if value not in known:
            few = f"; known: {', '.join(known)}" if len(known) <= 8 else ""
            hint = did_you_mean(value, known) or few or f"; none of AWS's {len(known)} values is similar"
            yield Violation(path, f"{_shown(value)} is not a value that AWS accepts{hint}")
        return
    yield from _bounds(len(value), shape, path, f"{_shown(value)} has", " characters")
    pattern = shape.metadata.get("pattern")
    compiled = compiled_pattern(pattern) if pattern else None
    if compiled and not compiled.fullmatch(value):
        yield Violation(path, f"{_shown(value)} does not match {pattern}")


@functools.cache
def compiled_pattern(pattern: str) -> re.Pattern[str] | None:
    """A pattern of a model, to be used with `fullmatch`, as AWS does. None where Python cannot express it: the value
    is then left to AWS."""
    text = pattern
    for java, python in _CATEGORIES.items():
        text = text.replace(java, python)
    try:
        return re.compile(text, re.ASCII if text == pattern else 0)  # Java's \d and \w are ASCII's
    except re.error:
        return None


def _bounds(number: float, shape: Any, path: str, verb: str, unit: str) -> Iterator[Violation]:
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    if least is not None and number < least:
        yield Violation(path, f"{verb} {number}{unit}; at least {least}")
    elif most is not None and number > most:
        yield Violation(path, f"{verb} {number}{unit}; at most {most}")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# `us-west-2`, `ap-southeast-1`, `us-gov-east-1`; the isolated and sovereign partitions use other forms
_REGION = re.compile(r"([a-z]{2})(-gov)?-((?:north|south)?(?:east|west)?|central)-(\d)")


@functools.cache
def known_regions(service: str) -> dict[str, str]:
    """The regions in which AWS offers a service, as botocore lists them without client or credentials.

    Of every partition: region -> partition (`aws`, `aws-cn`, ...).
    """
    from botocore.loaders import Loader  # noqa: PLC0415 - only here
    from botocore.regions import EndpointResolver  # noqa: PLC0415

    resolver = EndpointResolver(Loader().load_data("endpoints"))
    prefix = model(service).endpoint_prefix  # for example api.sagemaker
    return {
        region: partition
        for partition in resolver.get_available_partitions()
        for region in resolver.get_available_endpoints(prefix, partition)
    }


def zone_prefix(region: str) -> str | None:
    """The prefix of the ids of a region's availability zones: usw2 for us-west-2, usgw1 for us-gov-west-1.

    It is the area, `g` for GovCloud, the initials of the direction, and the number, for every region whose zones AWS
    documents ("Regions and Zones"). None for a region name of another form.
    """
    found = _REGION.fullmatch(region)
    if not found or not found[3]:
        return None
    area, government, direction, number = found.groups()
    initials = "".join(word[0] for word in re.findall("north|south|east|west|central", direction))
    return f"{area}{'g' if government else ''}{initials}{number}"


def dns_suffix(region: str) -> str:
    return "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
