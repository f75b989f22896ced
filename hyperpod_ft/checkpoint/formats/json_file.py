"""A JSON object that someone else wrote, or one line that says why it is none."""

import json
from pathlib import Path
from typing import Any

from hyperpod_ft.errors import UserError


def read_object(file: Path, remedy: str) -> dict[str, Any]:
    """Raises UserError when the file is missing, cannot be read, or holds no JSON object; `remedy` says what to do."""
    try:
        return parse_object(file, file.read_bytes(), remedy)
    except FileNotFoundError as error:
        raise UserError(f"{file}: is missing", remedy) from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}", remedy) from error


def parse_object(file: Path, content: bytes, remedy: str) -> dict[str, Any]:
    """The same of what was read; `file` is named in errors."""
    try:
        value = json.loads(content, object_pairs_hook=_names_checked)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: is damaged: {error}", remedy) from error
    if not isinstance(value, dict):
        raise UserError(f"{file}: holds no JSON object", remedy)
    return value


def _names_checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # of names that stand twice json keeps the last and drops the others; half a surrogate pair is no text
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{name} stands twice")
        values[name] = value
    "".join(values).encode()
    return values
