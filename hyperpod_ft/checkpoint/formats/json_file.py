"""JSON files that other programs wrote, read strictly: a wrong one is refused in one line that names file and key."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from hyperpod_ft.errors import UserError

_Model = TypeVar("_Model", bound=BaseModel)
_SHOWN = 3


def read(file: Path, model: type[_Model], remedy: str) -> _Model:
    """The file as `model`; `remedy` tells the user what to do about an error.

    Raises UserError when the file is missing, cannot be read, is not a JSON object, or does not fit the model.
    """
    return validate(file, read_object(file, remedy), model, remedy)


def validate(file: Path, values: Mapping[str, Any], model: type[_Model], remedy: str) -> _Model:
    """Values from `file` as `model`. Raises UserError that names the file and each wrong key."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{file}: {_problems(error)}", remedy) from error


def read_object(file: Path, remedy: str) -> dict[str, Any]:
    """Raises UserError when the file is missing, cannot be read, or is not a JSON object."""
    try:
        return parse_object(file, file.read_bytes(), remedy)
    except FileNotFoundError as error:
        raise UserError(f"{file}: is missing", remedy) from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}", remedy) from error


def parse_object(file: Path, content: bytes, remedy: str) -> dict[str, Any]:
    """The JSON object in `content`, which was read from `file`. Raises UserError when it is not one."""
    try:
        value = json.loads(content, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: is damaged: {error}", remedy) from error
    if not isinstance(value, dict):
        raise UserError(f"{file}: is not a JSON object", remedy)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # json keeps the last of duplicate keys and drops the others; an unpaired surrogate cannot be encoded
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"duplicate key {name}")
        values[name] = value
    "".join(values).encode()
    return values


def _problems(error: ValidationError) -> str:
    found = [
        f"{'.'.join(map(str, one['loc']))}: {one['msg'].removeprefix('Value error, ')}"
        for one in error.errors(include_url=False, include_input=False)
    ]
    more = [f"{len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return ", ".join(found[:_SHOWN] + more)
