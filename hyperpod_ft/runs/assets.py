"""The models, the adapter and the dataset that a run begins with, and where the files of all but the last are.

Nothing here needs a plan: choosing the degrees of one reads the model's config.json.
"""

import json
import os
from pathlib import Path
from typing import Any, Literal

from hyperpod_ft.checkpoint.adapters import lora_config
from hyperpod_ft.checkpoint.formats.added_tokens import with_room
from hyperpod_ft.checkpoint.formats.model_directory import read_config
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.config.sources import Asset
from hyperpod_ft.digests import text_sha256
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.continued import continued

Kind = Literal["model", "adapter", "dataset"]


def assets(config: RunConfig) -> list[tuple[str, Kind, Asset]]:
    """What stage download fetches: where the run file has it, what it is, and from where."""
    return [
        ("model", "model", config.model.asset),
        *([("model.adapter", "adapter", config.model.adapter.asset)] if config.model.adapter else ()),
        *([("teacher", "model", config.teacher.asset)] if config.teacher else ()),
        *((part.key, "dataset", part.dataset.asset) for part in config.dataset.parts),
    ]


def fetched_model(config: RunConfig) -> Path:
    """The directory in which stage download puts the model of `model.source`."""
    return config.root / "models" / config.model.asset.slug


def teacher(config: RunConfig) -> Path | None:
    """The directory in which stage download puts the teacher; None without one."""
    return config.root / "models" / config.teacher.asset.slug if config.teacher else None


def teacher_here(config: RunConfig) -> Path | None:
    """A directory that has the teacher; None when none is on this machine."""
    fetched = teacher(config)
    return _here(fetched, config.teacher.source) if fetched and config.teacher else None


def base_model(config: RunConfig) -> Path:
    """The directory of the base model: what was fetched, or what stage download makes of it.

    That has the tokens of `model.new_tokens`, or with objective reward a score.
    """
    fetched, model = fetched_model(config), config.model
    if config.training.objective == "reward":
        return fetched.with_name(f"{fetched.name}+score")
    if not model.added_tokens:
        return fetched
    digest = text_sha256(json.dumps([model.new_tokens, model.new_special_tokens]))[:12]
    return fetched.with_name(f"{fetched.name}+{digest}")


def starting_adapter(config: RunConfig) -> Path | None:
    """The directory in which stage download puts the adapter that training continues; None for a new one."""
    return config.root / "adapters" / config.model.adapter.asset.slug if config.model.adapter else None


def is_adapter_known(config: RunConfig) -> bool:
    """Whether section `lora` is what training will use: an adapter that it continues may not be here yet."""
    return config.model.adapter is None or _adapter_directory(config) is not None


def with_adapter(config: RunConfig) -> RunConfig:
    """The config with the values of the adapter that training continues in section `lora`, once it is here.

    Raises UserError when the run file contradicts the adapter, or training cannot continue it.
    """
    directory = _adapter_directory(config)
    if directory is None:
        return config
    try:
        adapter = lora_config.read_config(directory / lora_config.CONFIG)
    except UserError as error:
        remedy = "give the directory in which PEFT or this kit has saved an adapter"
        raise UserError(f"model.adapter.source: {error.problem}", remedy) from error
    return continued(config, adapter)


def _adapter_directory(config: RunConfig) -> Path | None:
    """A directory that has the adapter; None when none is on this machine."""
    fetched = starting_adapter(config)
    return _here(fetched, config.model.adapter.source) if fetched and config.model.adapter else None


def _here(fetched: Path, source: str) -> Path | None:
    """The directory of the two that is on this machine."""
    # false, not an error, below a directory that this user may not enter
    return next((path for path in (fetched, Path(source)) if path.is_absolute() and os.path.exists(path)), None)  # noqa: PTH110


def raw_dataset(config: RunConfig, dataset: Dataset) -> Path:
    """The directory of a source's own files. Its name has a digest of what chooses them: two runs may differ."""
    wanted = text_sha256("\n".join([*dataset.files, dataset.split_name]))[:6]
    return config.root / "datasets" / "raw" / f"{dataset.asset.slug}-{wanted}"


def early_config(config: RunConfig) -> Path:
    """A directory for config.json alone, until the whole model is there."""
    return config.root / "models" / ".config" / config.model.asset.slug


def config_directory(config: RunConfig) -> Path | None:
    """A directory that has the model's config.json; None when none is on this machine."""
    for directory in (base_model(config), fetched_model(config), Path(config.model.source), early_config(config)):
        if directory.is_absolute() and directory.is_dir():
            return directory
    return None


def model_config(config: RunConfig) -> dict[str, Any]:
    """config.json of the base model. Raises UserError when it is not on this machine, or is damaged."""
    directory = config_directory(config)
    if directory is None:
        raise UserError(
            f"parallelism.degrees: auto needs the config.json of {config.model.source}, which is not on this volume",
            "hyperpod-ft plan RUN_FILE fetches it",
        )
    found = read_config(directory, "set model.source to the directory of a Hugging Face model")
    return with_room(found, directory, config.model.new_tokens, config.model.new_special_tokens)
