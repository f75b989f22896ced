"""The configuration of a LoRA adapter, `adapter_config.json`: what of it decides the merged weights.

Sources: PEFT 0.17, tuners/lora/config.py, tuners/tuners_utils.py (`check_target_module_exists`) and utils/other.py
(`get_pattern_key`).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hyperpod_ft.checkpoint.formats.json_file import read_object
from hyperpod_ft.errors import UserError

CONFIG = "adapter_config.json"
# A string that stands for every linear layer besides the output layer; PEFT saves the modules' names in its place.
_ALL_LINEAR = "all-linear"
# Initialisations that change the base's weights as well (PEFT, tuners/lora/layer.py, `pissa_init` and its neighbours).
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
# Keys that may be set without any effect on a merge. Whatever else is set and not read here would change the merged
# weights: a merge that leaves it out would be wrong silently.
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ephemeral_gpu_offload",
        "eva_config",
        "fan_in_fan_out",  # PEFT goes by the module's class
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)


_MAX_PATTERN = 4096


@dataclass(frozen=True)
class AdapterConfig:
    """Modules are named as in the base model, without `base_model.model.`.

    `target_modules`, `exclude_modules`: names or the ends of names; a string is a regular expression of whole names.
    """

    r: int
    alpha: float
    rslora: bool
    target_modules: tuple[str, ...] | str
    exclude_modules: tuple[str, ...] | str = ()
    layers: frozenset[int] = frozenset()  # empty: all
    layers_pattern: tuple[str, ...] = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    modules_to_save: tuple[str, ...] = ()
    bias: str = "none"  # or all, or lora_only: those of the base that were trained
    lora_bias: bool = False
    dora: bool = False
    unsupported: tuple[str, ...] = ()  # keys of what changes the merged weights, and no merge here does

    @property
    def all_linear(self) -> bool:
        return isinstance(self.target_modules, str) and self.target_modules.lower() == _ALL_LINEAR

    def rank(self, module: str) -> int:
        return int(_by_pattern(self.rank_pattern, module, self.r))

    def scale(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) with rslora (arXiv 2312.03732): PEFT's `LoraLayer.scaling`."""
        rank = self.rank(module)
        alpha = _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def targets(self, module: str) -> bool:
        """Whether PEFT would give the module factors, were it a linear layer or an embedding; not of `all-linear`."""
        if self._excludes(module):
            return False
        if isinstance(self.target_modules, str):
            return re.fullmatch(self.target_modules, module) is not None
        return any(ends_with(module, target) for target in self.target_modules) and self._in_layers(module)

    def saves(self, module: str) -> bool:
        """Whether the module, or one that it is part of, is saved whole (PEFT, utils/other.py, `_set_trainable`)."""
        parts = module.split(".")
        parents = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
        return any(parent.endswith(saved) for parent in parents for saved in self.modules_to_save)

    def _excludes(self, module: str) -> bool:
        if isinstance(self.exclude_modules, str) and re.fullmatch(self.exclude_modules, module):
            return True
        # adapters never match what is saved whole, nor what it is made of
        saved = any(re.match(rf"(^|.*\.){name}($|\..*)", module) for name in self.modules_to_save)
        return saved or any(ends_with(module, name) for name in self.exclude_modules)

    def _in_layers(self, module: str) -> bool:
        if not self.layers:
            return True
        patterns = self.layers_pattern or (r"[^.]*",)
        found = next((match for pattern in patterns if (match := re.match(rf".*\.{pattern}\.(\d+)\.", module))), None)
        return found is not None and int(found[1]) in self.layers

    def as_peft(self, base_model: str, revision: str | None, dropout: float) -> dict[str, Any]:
        """adapter_config.json as PEFT reads it, of a configuration without the fields that have a default."""
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


def ends_with(module: str, name: str) -> bool:
    """Whether `name` is the module, or the last parts of its name."""
    return module == name or module.endswith("." + name)


def _by_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first pattern, a regular expression, that matches the end of the module's name."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def read_config(file: Path) -> AdapterConfig:
    """Raises UserError when it is no LoRA configuration."""
    return parse_config(file, read_object(file, "make the adapter again"))


def parse_config(file: Path, values: Any) -> AdapterConfig:
    """The same of what `file` holds."""
    try:
        if values["peft_type"] != "LORA":
            raise UserError(f"{file}: peft_type {values['peft_type']}: only LORA can be merged", "merge it with PEFT")
        left = {key: value for key, value in values.items() if key not in _WITHOUT_EFFECT}
        del left["peft_type"]
        initialization = str(left.pop("init_lora_weights", True)).lower()
        config = AdapterConfig(
            r=_rank(left.pop("r")),
            alpha=float(left.pop("lora_alpha")),
            rslora=bool(left.pop("use_rslora", False)),
            target_modules=_names(left.pop("target_modules")),
            exclude_modules=_names(left.pop("exclude_modules", None)),
            layers=_layers(left.pop("layers_to_transform", None)),
            layers_pattern=_listed(left.pop("layers_pattern", None)),
            rank_pattern={key: _rank(rank) for key, rank in (left.pop("rank_pattern", None) or {}).items()},
            alpha_pattern={key: float(alpha) for key, alpha in (left.pop("alpha_pattern", None) or {}).items()},
            modules_to_save=_listed(left.pop("modules_to_save", None)),
            bias=str(left.pop("bias", "none")),
            lora_bias=bool(left.pop("lora_bias", False)),
            dora=bool(left.pop("use_dora", False)),
        )
        unsupported = sorted(key for key, value in left.items() if value)
        if initialization.startswith(_CHANGES_BASE):
            unsupported.append(f"init_lora_weights ({initialization})")
        config = replace(config, unsupported=tuple(unsupported))
        scales = [config.scale(key) for key in ("", *config.rank_pattern, *config.alpha_pattern)]
        if not all(map(math.isfinite, scales)):
            raise ValueError(f"lora_alpha {config.alpha} and alpha_pattern {dict(config.alpha_pattern)} give no scale")
        _check_patterns(config)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError, re.error) as error:
        raise UserError(f"{file}: is no LoRA configuration: {error!r}", "make the adapter again") from error
    return config


def _check_patterns(config: AdapterConfig) -> None:
    """Raise re.error or ValueError unless every regular expression is one, and one whose time is bounded."""
    expressions = [*config.layers_pattern, *config.rank_pattern, *config.alpha_pattern]
    expressions += [names for names in (config.target_modules, config.exclude_modules) if isinstance(names, str)]
    for expression in expressions:
        re.compile(expression)
        # (a+)+ takes for ever on a name that does not match
        if len(expression) > _MAX_PATTERN or re.search(r"[+*}]\)[+*{]", expression):
            raise ValueError(f"the pattern {expression[:100]!r} may take for ever")


def _rank(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"rank {value!r}")
    return value


def _names(value: Any) -> tuple[str, ...] | str:
    return value if isinstance(value, str) else _listed(value)


def _listed(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value or ())
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"no names: {value!r}")
    return names


def _layers(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    layers = frozenset([value]) if isinstance(value, int) else frozenset(value)
    if not all(type(layer) is int for layer in layers):
        raise ValueError(f"no numbers of layers: {value!r}")
    return layers
