"""The files of a Hugging Face model besides its weights: configuration, tokenizer, chat template, licence."""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError
from hyperpod_ft.model_files import BESIDE_WEIGHTS

CONFIG = "config.json"


def copy_files(base: Path, target: Path, patterns: Iterable[str] = BESIDE_WEIGHTS) -> list[str]:
    """Copy what is not weights; contents, not links, with modes by the umask. Returns the names."""
    names = sorted(
        {file.relative_to(base).as_posix() for pattern in patterns for file in base.glob(pattern) if file.is_file()}
    )
    for name in names:
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(base / name, target / name)
    return names


def read_config(directory: Path) -> dict[str, Any]:
    """config.json. Raises UserError when it is missing or no JSON object."""
    file = directory / CONFIG
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read: {error}", "download the model again") from error
    if not isinstance(values, dict):
        raise UserError(f"{file}: holds no JSON object", "download the model again")
    return values


def is_tied(directory: Path) -> bool:
    """Whether the model's output layer is its input embedding (`tie_word_embeddings`)."""
    return bool(read_config(directory).get("tie_word_embeddings", False))


def set_dtype(directory: Path, torch_name: str) -> None:
    """Make config.json tell the dtype of the weights, under the key that it uses.

    transformers before 4.56 wrote `torch_dtype`, later ones `dtype`; both are read.
    """
    values = read_config(directory)
    keys = [key for key in ("dtype", "torch_dtype") if key in values] or ["torch_dtype"]
    update_config(directory, dict.fromkeys(keys, torch_name))


def update_config(directory: Path, values: Mapping[str, Any]) -> None:
    """Set values in config.json."""
    publish.write_json(directory / CONFIG, read_config(directory) | dict(values))
