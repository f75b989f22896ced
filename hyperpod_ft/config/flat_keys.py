"""Nested values under one key each."""

from collections.abc import Mapping
from typing import Any


def flattened(values: Mapping[str, Any], separator: str = ".") -> dict[str, Any]:
    """Each value by its whole key, such as `section.key`; lists, and mappings without a key, are values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{key}{separator}{below}": one for below, one in flattened(value, separator).items()}
        else:
            flat[key] = value
    return flat
