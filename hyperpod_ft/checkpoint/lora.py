"""LoRA adapters in PEFT's format: their configuration, their tensor names, and how they sit on a base model.

Names: PEFT saves `base_model.model.<module>.lora_A.weight` with shape (r, in) and `.lora_B.weight` with (out, r) for
the base's `<module>.weight` with (out, in) (peft/utils/save_and_load.py, get_peft_model_state_dict).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperpod_ft.checkpoint.layout import FLOATING, LogicalTensor
from hyperpod_ft.errors import UserError

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"

# Whatever would change the merged weights and is not done here: a merge that leaves it out would be wrong silently.
_UNSUPPORTED = (
    "use_dora",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "fan_in_fan_out",
    "lora_bias",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "use_qalora",
)
# Initialisations that change the base's weights as well (peft/tuners/lora/layer.py, pissa_init and its neighbours).
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True)
class AdapterConfig:
    """What of adapter_config.json decides the merged weights."""

    r: int
    alpha: float
    rslora: bool
    target_modules: tuple[str, ...]

    @property
    def scale(self) -> float:
        """alpha / r, or alpha / sqrt(r) with rslora (arXiv 2312.03732): PEFT's `LoraLayer.scaling`."""
        return self.alpha / math.sqrt(self.r) if self.rslora else self.alpha / self.r

    def as_peft(self, base_model: str, revision: str | None, dropout: float) -> dict[str, Any]:
        """adapter_config.json as PEFT reads it."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "revision": revision,
            "inference_mode": True,
            "r": self.r,
            "lora_alpha": int(self.alpha) if self.alpha == int(self.alpha) else self.alpha,
            "lora_dropout": dropout,
            "use_rslora": self.rslora,
            "use_dora": False,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "modules_to_save": None,
            "rank_pattern": {},
            "alpha_pattern": {},
            "target_modules": sorted(self.target_modules),
        }


@dataclass(frozen=True)
class Pair:
    """The two factors on one weight of the base: weight += scale * (b @ a)."""

    weight: str
    a: LogicalTensor  # (r, in)
    b: LogicalTensor  # (out, r)


def read_config(file: Path) -> AdapterConfig:
    """Raises UserError when it is no LoRA configuration, or asks for what the merge does not do."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if values["peft_type"] != "LORA":
            raise UserError(f"{file}: peft_type {values['peft_type']}: only LORA can be merged", "merge it with PEFT")
        unsupported = [key for key in _UNSUPPORTED if values.get(key)]
        if values.get("bias", "none") != "none":
            unsupported.append("bias")
        if str(values.get("init_lora_weights")).startswith(_CHANGES_BASE):
            unsupported.append("init_lora_weights")
        if unsupported:
            raise UserError(f"{file}: merge does not handle: {', '.join(unsupported)}", "merge it with PEFT")
        targets = values["target_modules"]
        config = AdapterConfig(
            r=int(values["r"]),
            alpha=float(values["lora_alpha"]),
            rslora=bool(values.get("use_rslora", False)),
            target_modules=(targets,) if isinstance(targets, str) else tuple(targets),
        )
    except FileNotFoundError as error:
        raise UserError(f"{file}: is missing", "run the stage consolidate again") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: is no LoRA configuration: {error!r}", "make the adapter again") from error
    if config.r < 1 or not math.isfinite(config.scale):
        raise UserError(f"{file}: r {config.r} and lora_alpha {config.alpha} give no scale", "correct it")
    return config


def pairs(
    where: Path, adapter: Sequence[LogicalTensor], base: Mapping[str, LogicalTensor], r: int, tied: bool
) -> list[Pair]:
    """The adapter's tensors, each matched to the base's weight. `tied`: the base's output layer is its embedding.

    Raises UserError when any tensor is no LoRA factor of a linear module, lacks its partner, or does not fit the base.
    """
    by_name = {tensor.name: tensor for tensor in adapter}
    if not by_name:
        raise UserError(f"{where}: the adapter holds no tensors", "train again")
    found = []
    for name, tensor in by_name.items():
        if not (name.startswith(_PREFIX) and name.endswith((_A, _B))) or tensor.dtype not in FLOATING:
            raise UserError(
                f"{where}: tensor {name} is no LoRA factor of a linear module", "it can only be merged with PEFT"
            )
        if name.endswith(_B):
            if name.removesuffix(_B) + _A not in by_name:
                raise UserError(f"{where}: {name} has no lora_A", "the adapter is incomplete")
            continue
        module = name.removesuffix(_A)
        if module + _B not in by_name:
            raise UserError(f"{where}: {name} has no lora_B", "the adapter is incomplete")
        pair = Pair(module.removeprefix(_PREFIX) + ".weight", tensor, by_name[module + _B])
        _check_fit(where, pair, base, r, tied)
        found.append(pair)
    return found


def _check_fit(where: Path, pair: Pair, base: Mapping[str, LogicalTensor], r: int, tied: bool) -> None:
    if pair.weight not in base:
        raise UserError(
            f"{where}: the adapter does not fit the base model: it has no {pair.weight}",
            "use the base it was trained on",
        )
    if tied and pair.weight in ("lm_head.weight", "model.embed_tokens.weight"):
        raise UserError(
            f"{where}: {pair.weight} is tied to another weight of the base model: an update of it alone is lost",
            "leave it out of lora.target_modules",
        )
    weight = base[pair.weight]
    wanted = (pair.b.shape[:1] + pair.a.shape[1:], (r, *pair.a.shape[1:]), (*pair.b.shape[:1], r))
    if (weight.shape, pair.a.shape, pair.b.shape) != wanted or len(weight.shape) != 2:
        raise UserError(
            f"{where}: the adapter does not fit the base model at {pair.weight}: lora_B {list(pair.b.shape)} x lora_A"
            f" {list(pair.a.shape)} of rank {r} on a weight {list(weight.shape)}",
            "use the base it was trained on",
        )
    if weight.dtype not in FLOATING:
        raise UserError(f"{where}: {pair.weight} of the base model is quantized ({weight.dtype})", "use another base")


def refuse_gaps(
    where: Path, matched: Sequence[Pair], base: Mapping[str, LogicalTensor], targets: Sequence[str]
) -> None:
    """Raise UserError when a weight that the target modules name has no factors: PEFT would invent them."""
    have = {pair.weight for pair in matched}
    for name, tensor in base.items():
        module = name.removesuffix(".weight")
        targeted = any(module == target or module.endswith("." + target) for target in targets)
        if targeted and name.endswith(".weight") and len(tensor.shape) == 2 and name not in have:
            raise UserError(f"{where}: the adapter has no factors for {name}", "the checkpoint is incomplete")
