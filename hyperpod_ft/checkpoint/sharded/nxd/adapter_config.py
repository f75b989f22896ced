"""The configuration of an adapter in a neuronx-distributed checkpoint, as PEFT has to read it."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hyperpod_ft.checkpoint.formats.json_file import read_object
from hyperpod_ft.checkpoint.tensors.layout import LogicalTensor
from hyperpod_ft.errors import UserError

CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."
_FACTORS = {
    ".lora_A.weight": ".lora_B.weight",
    ".lora_B.weight": ".lora_A.weight",
    ".lora_embedding_A": ".lora_embedding_B",
    ".lora_embedding_B": ".lora_embedding_A",
}


def read_config(file: Path) -> dict[str, Any]:
    """adapter_config.json as it stands. Raises UserError when it is missing or damaged, or not of a LoRA."""
    values = read_object(file, "the checkpoint is incomplete or damaged: use another")
    try:
        if values["peft_type"] != "LORA":
            raise UserError(f"{file}: peft_type {values['peft_type']}", "only LoRA can be read")
        if not isinstance(values["r"], int) or not isinstance(values["lora_alpha"], int | float):
            raise ValueError(f"r {values['r']!r}, lora_alpha {values['lora_alpha']!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: is no LoRA configuration: {error!r}", "the file is damaged") from error
    if values.get("use_dora"):
        # its magnitudes are norms over a rank's rows or columns only, and the metadata does not tell them apart
        raise UserError(f"{file}: use_dora: optimum-neuron does not shard DoRA", "train with plain LoRA")
    return values


def fitted_config(
    file: Path, values: Mapping[str, Any], tensors: Iterable[LogicalTensor], trained_as: Mapping[str, str]
) -> dict[str, Any]:
    """The configuration with which PEFT gives each module the rank and alpha that it was trained with.

    `trained_as`: for each projection that was part of a fused module, that module's name. rank_pattern and
    alpha_pattern chose ranks and scales by the fused names, which Hugging Face's model does not have, and those of the
    projections it has meant nothing; where that makes a difference, the patterns are written anew.

    Raises UserError when factors lack their partners, or ranks differ from the configuration.
    """
    ranks = _ranks(file.parent, tensors)
    alphas = {}
    for module, rank in ranks.items():
        live = trained_as.get(module, module).removeprefix(_PREFIX)
        meant = _matching(file, values, "rank_pattern", live, values["r"])
        if meant != rank:
            raise UserError(
                f"{file}: gives {live} rank {meant}, its factors have rank {rank}",
                "configuration and weights are of different checkpoints: use another",
            )
        alphas[module] = _matching(file, values, "alpha_pattern", live, values["lora_alpha"])
    fitted = dict(values)
    for key, default, actual in (("rank_pattern", values["r"], ranks), ("alpha_pattern", values["lora_alpha"], alphas)):
        named = {module.removeprefix(_PREFIX): value for module, value in actual.items()}
        if any(_matching(file, values, key, module, default) != value for module, value in named.items()):
            fitted[key] = {module: value for module, value in named.items() if value != default}
    return fitted


def _ranks(where: Path, tensors: Iterable[LogicalTensor]) -> dict[str, int]:
    """The rank of each module that has factors."""
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    ranks = {}
    for name, shape in shapes.items():
        suffix = next((suffix for suffix in _FACTORS if name.endswith(suffix)), None)
        if suffix is None:
            continue
        module = name.removesuffix(suffix)
        partner = shapes.get(module + _FACTORS[suffix])
        if partner is None:
            raise UserError(f"{where}: {name} has no {module}{_FACTORS[suffix]}", "the checkpoint is incomplete")
        first, second = (shape, partner) if suffix.endswith(("A", "A.weight")) else (partner, shape)
        if len(first) != 2 or len(second) != 2 or first[0] != second[1]:
            raise UserError(
                f"{where}: factors {list(first)} and {list(second)} of {module}", "the checkpoint is damaged"
            )
        ranks[module] = first[0]
    if not ranks:
        raise UserError(f"{where}: the adapter has no LoRA factors", "the checkpoint is incomplete: use another")
    return ranks


def _matching(file: Path, values: Mapping[str, Any], key: str, module: str, default: float) -> float:
    """What a pattern gives a module, as PEFT finds it (PEFT 0.17, utils/other.py, `get_pattern_key`)."""
    patterns = values.get(key) or {}
    try:
        found = next((patterns[pattern] for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", module)), default)
        if not isinstance(found, int | float):
            raise TypeError(f"{found!r} is no number")
    except (re.error, TypeError) as error:
        raise UserError(f"{file}: {key} cannot be read: {error}", "the file is damaged") from error
    return found
