"""The configuration of an adapter in a neuronx-distributed checkpoint, changed where PEFT would misread it."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hyperpod_ft.checkpoint.adapters.lora_config import AdapterConfig, parse_config
from hyperpod_ft.checkpoint.formats.json_file import read_object
from hyperpod_ft.checkpoint.sharded.description import DAMAGED, INCOMPLETE
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.errors import UserError

_PREFIX = "base_model.model."
_FACTORS = {
    ".lora_A.weight": ".lora_B.weight",
    ".lora_B.weight": ".lora_A.weight",
    ".lora_embedding_A": ".lora_embedding_B",
    ".lora_embedding_B": ".lora_embedding_A",
}


def read_config(file: Path) -> tuple[dict[str, Any], AdapterConfig]:
    """adapter_config.json as written and as parsed. Raises UserError when it is not that of a LoRA without DoRA."""
    values = read_object(file, "the checkpoint is incomplete or damaged: use an earlier one")
    config = parse_config(file, values)
    if config.use_dora:
        # its magnitudes are norms over one rank's rows or columns, and the metadata does not tell which
        raise UserError(f"{file}: use_dora: optimum-neuron does not shard DoRA", "train with plain LoRA")
    return values, config


def fitted_config(
    file: Path,
    values: Mapping[str, Any],
    config: AdapterConfig,
    tensors: Iterable[LogicalTensor],
    trained_as: Mapping[str, str],
) -> dict[str, Any]:
    """The configuration with which PEFT gives each module the rank and alpha that it was trained with.

    `trained_as`: the fused module of each projection that was part of one. During training, rank_pattern and
    alpha_pattern matched the fused names. Hugging Face's model has the projections' names instead, so patterns that
    would match differently there are rewritten.

    Names of modules are sorted: PEFT keeps them in a set, whose order differs from one process to the next, and the
    same training must give the same file.

    Raises UserError when a factor has no partner, or a rank differs from the configuration.
    """
    ranks = _ranks(file.parent, tensors)
    alphas = {}
    for module, rank in ranks.items():
        live = trained_as.get(module, module).removeprefix(_PREFIX)
        if config.rank(live) != rank:
            raise UserError(
                f"{file}: gives {live} rank {config.rank(live)}, its factors have rank {rank}",
                "configuration and weights belong to different checkpoints: use an earlier one",
            )
        alphas[module] = config.alpha(live)
    fitted = {
        key: sorted(value) if key in ("target_modules", "exclude_modules") and isinstance(value, list) else value
        for key, value in values.items()
    }
    patterns = (
        ("rank_pattern", config.rank, config.r, ranks),
        ("alpha_pattern", config.alpha, config.lora_alpha, alphas),
    )
    for key, matching, default, actual in patterns:
        named = {module.removeprefix(_PREFIX): value for module, value in actual.items()}
        if any(matching(module) != value for module, value in named.items()):
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
            raise UserError(f"{where}: {name} has no {module}{_FACTORS[suffix]}", INCOMPLETE)
        first, second = (shape, partner) if suffix.endswith(("A", "A.weight")) else (partner, shape)
        if len(first) != 2 or len(second) != 2 or first[0] != second[1]:
            raise UserError(
                f"{where}: the factors of {module} have shapes {list(first)} and {list(second)}, which do not match",
                DAMAGED,
            )
        ranks[module] = first[0]
    if not ranks:
        raise UserError(f"{where}: the adapter has no LoRA factors", INCOMPLETE)
    return ranks
