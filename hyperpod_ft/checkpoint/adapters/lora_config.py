"""How PEFT describes a LoRA adapter: `adapter_config.json`, whose keys decide the merged weights, and the names of its
parameters.

Sources: PEFT 0.17, tuners/lora/config.py, tuners/tuners_utils.py (`check_target_module_exists`) and utils/other.py
(`get_pattern_key`). The names of a live model's parameters include the adapter: `...q_proj.lora_A.default.weight`,
`...norm.modules_to_save.default.weight`, `...embed_tokens.lora_embedding_A.default`; files omit the adapter's name
(utils/save_and_load.py, `get_peft_model_state_dict`).
"""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from hyperpod_ft.checkpoint.formats.json_file import read_object, validate
from hyperpod_ft.errors import UserError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every name in that file
# Means every linear layer except the output layer; PEFT replaces it with the modules' names when it saves.
_ALL_LINEAR = "all-linear"
# Initializations that change the base's weights as well (PEFT, tuners/lora/layer.py, `pissa_init` and its neighbours).
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
# Keys that may be set without any effect on a merge. Any other key that is set and not read here could change the
# merged weights, so a merge that ignored it could be silently wrong.
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
        "peft_type",  # checked before
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
# The version whose form of `target_parameters` is written.
_PEFT = "0.21.2"
_MAX_PATTERN = 4096
_REMEDY = "save the adapter again"


def _checked_pattern(text: str) -> str:
    """Raises ValueError unless `text` is a regular expression that matches in bounded time."""
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{text[:100]!r} is not a regular expression: {error}") from error
    # (a+)+ backtracks exponentially on a name that does not match
    if len(text) > _MAX_PATTERN or re.search(r"[+*}]\)[+*{]", text):
        raise ValueError(f"matching the pattern {text[:100]!r} may take exponential time")
    return text


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | int) else value


_Pattern = Annotated[str, AfterValidator(_checked_pattern)]
_Rank = Annotated[int, Field(strict=True, ge=1, lt=1 << 31)]
_Alpha = Annotated[float, Field(allow_inf_nan=False)]
_Patterns = Annotated[tuple[_Pattern, ...], BeforeValidator(_as_list)]
_Layers = Annotated[frozenset[Annotated[int, Field(strict=True)]], BeforeValidator(_as_list)]


class AdapterConfig(BaseModel):
    """The fields have PEFT's names. Modules are named as in the base model, without `base_model.model.`.

    `target_modules`, `exclude_modules`: names or the ends of names; a string is a regular expression of whole names.
    `target_parameters`: names of parameters or their ends, `mlp.experts.down_proj` or `mlp.up_proj.weight`.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    r: _Rank
    lora_alpha: _Alpha
    use_rslora: bool = False
    target_modules: str | tuple[str, ...] = ()
    target_parameters: tuple[str, ...] = ()
    exclude_modules: str | tuple[str, ...] = ()
    layers_to_transform: _Layers = frozenset()  # empty: all
    layers_pattern: _Patterns = ()
    rank_pattern: Mapping[_Pattern, _Rank] = Field(default_factory=dict)
    alpha_pattern: Mapping[_Pattern, _Alpha] = Field(default_factory=dict)
    modules_to_save: _Patterns = ()
    bias: Literal["none", "all", "lora_only"] = "none"  # which biases of the base were trained
    lora_bias: bool = False
    use_dora: bool = False
    init_lora_weights: bool | str = True
    peft_version: str | None = None  # that has saved it, since 0.18

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, values: Any) -> Any:
        # PEFT writes null for every option that is not used
        return {key: value for key, value in dict(values).items() if value is not None}

    @field_validator("target_modules", "exclude_modules")
    @classmethod
    def _checked_modules(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        return _checked_pattern(value) if isinstance(value, str) else value

    @property
    def unsupported(self) -> list[str]:
        """The keys that change the merged weights in a way that no merge here does."""
        extra = self.model_extra or {}
        found = sorted(key for key, value in extra.items() if value and key not in _WITHOUT_EFFECT)
        initialization = str(self.init_lora_weights).lower()
        if initialization.startswith(_CHANGES_BASE):
            found.append(f"init_lora_weights ({initialization})")
        return found

    @property
    def all_linear(self) -> bool:
        return isinstance(self.target_modules, str) and self.target_modules.lower() == _ALL_LINEAR

    def rank(self, module: str) -> int:
        return int(_by_pattern(self.rank_pattern, module, self.r))

    def alpha(self, module: str) -> float:
        return _by_pattern(self.alpha_pattern, module, self.lora_alpha)

    def scale(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) with rslora (arXiv 2312.03732): PEFT's `LoraLayer.scaling`."""
        rank = self.rank(module)
        return self.alpha(module) / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str) -> bool:
        """Whether PEFT adds factors to the module, if it is a linear layer or an embedding. Not for `all-linear`."""
        if any(ends_with(f"{module}.weight", target) for target in self.target_parameters):
            return True
        if self._excludes(module):
            return False
        if isinstance(self.target_modules, str):
            return re.fullmatch(self.target_modules, module) is not None
        return any(ends_with(module, target) for target in self.target_modules) and self._in_layers(module)

    def saves(self, module: str) -> bool:
        """Whether the module, or one that contains it, is saved whole (PEFT, utils/other.py, `_set_trainable`)."""
        parts = module.split(".")
        parents = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
        return any(parent.endswith(saved) for parent in parents for saved in self.modules_to_save)

    def _excludes(self, module: str) -> bool:
        if isinstance(self.exclude_modules, str) and re.fullmatch(self.exclude_modules, module):
            return True
        # PEFT gives no factors to a module that is saved whole, nor to its parts
        saved = any(re.match(rf"(^|.*\.){name}($|\..*)", module) for name in self.modules_to_save)
        return saved or any(ends_with(module, name) for name in self.exclude_modules)

    def _in_layers(self, module: str) -> bool:
        if not self.layers_to_transform:
            return True
        patterns = self.layers_pattern or (r"[^.]*",)
        found = next((match for pattern in patterns if (match := re.match(rf".*\.{pattern}\.(\d+)\.", module))), None)
        return found is not None and int(found[1]) in self.layers_to_transform

    def as_peft(
        self, base_model: str, revision: str | None, dropout: float, task: str, fan_in_fan_out: bool
    ) -> dict[str, Any]:
        """adapter_config.json for PEFT, of a configuration whose other optional fields have their defaults."""
        modules = self.target_modules
        parameters = {"target_parameters": sorted(self.target_parameters), "peft_version": _PEFT}
        return {
            "peft_type": "LORA",
            "task_type": task,
            "base_model_name_or_path": base_model,
            "revision": revision,
            "inference_mode": True,
            "r": self.r,
            "lora_alpha": int(self.lora_alpha) if self.lora_alpha.is_integer() else self.lora_alpha,
            "lora_dropout": 0.0 if self.target_parameters else dropout,  # PEFT refuses it, and only training has it
            "use_rslora": self.use_rslora,
            "use_dora": self.use_dora,
            "bias": "none",
            "fan_in_fan_out": fan_in_fan_out,
            "init_lora_weights": True,
            "modules_to_save": sorted(self.modules_to_save) or None,
            "rank_pattern": {},
            "alpha_pattern": {},
            "target_modules": modules if isinstance(modules, str) else sorted(modules),
        } | (parameters if self.target_parameters else {})


def in_language_model(names: Iterable[str]) -> str:
    """`target_modules` for modules of an image-text model's language model whose names end with one of `names`.

    The tower that reads images may have modules of the same names.
    """
    ends = "|".join(re.escape(name) for name in names)
    return rf"(?:.*\.)?(?:(?:language_model|text_model)\.(?:.*\.)?|(?=lm_head$))(?:{ends})"


def in_image_tower(names: Iterable[str]) -> str:
    """The same for modules of the tower that reads images."""
    ends = "|".join(re.escape(name) for name in names)
    return rf"(?:.*\.)?visual\.(?:.*\.)?(?:{ends})"


def names_in_language_model(pattern: str) -> tuple[str, ...]:
    """The names from which `in_language_model` has made a pattern; none if it has made no such pattern."""
    ends = pattern.rpartition("(?:")[2].removesuffix(")")
    names = tuple(re.sub(r"\\(.)", r"\1", end) for end in ends.split("|"))
    return names if in_language_model(names) == pattern else ()


def ends_with(module: str, name: str) -> bool:
    """Whether `name` is the module, or the last parts of its name."""
    return module == name or module.endswith("." + name)


def _by_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first pattern, a regular expression, that matches the end of the module's name."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def read_config(file: Path) -> AdapterConfig:
    """Raises UserError when the file is missing or is not the configuration of a LoRA adapter."""
    return parse_config(file, read_object(file, _REMEDY))


def parse_config(file: Path, values: Mapping[str, Any]) -> AdapterConfig:
    """The configuration from the JSON object in `file`, which errors name."""
    if values.get("peft_type") != "LORA":
        raise UserError(f"{file}: peft_type is {values.get('peft_type')!r}, not 'LORA'", "merge it with PEFT")
    return validate(file, values, AdapterConfig, _REMEDY)


_LIVE = re.compile(
    r"(?P<module>.+?)\.(?:(?P<factor>lora_\w+)\.(?P<adapter>[^.]+)|modules_to_save\.(?P<saver>[^.]+)|original_module)"
    r"(?P<parameter>(?:\.[^.]+)*)"
)


def saved_name(live: str, adapter: str) -> str | None:
    """The name of a live parameter in the adapter's files; None if it belongs to another adapter."""
    match = _LIVE.fullmatch(live)
    if match is None:
        return live
    if adapter not in (match["adapter"], match["saver"]):
        return None
    middle = f".{match['factor']}" if match["factor"] else ""
    return f"{match['module']}{middle}{match['parameter']}"


def original_name(live: str) -> str:
    """The base's parameter that a live parameter of `modules_to_save` is a copy of; other names as they are."""
    match = _LIVE.fullmatch(live)
    if match is None or match["saver"] is None:
        return live
    return f"{match['module']}.original_module{match['parameter']}"


def is_trained(live: str) -> bool:
    """Whether a live parameter belongs to an adapter, whose files must have it."""
    match = _LIVE.fullmatch(live)
    return match is not None and bool(match["adapter"] or match["saver"])


def is_frozen_base(name: str) -> bool:
    """Whether a saved name is that of a base weight under LoRA.

    PEFT saves the base's embedding along with an embedding's factors (`save_embedding_layers`). It was not trained, so
    the merge takes it from the base model. A base bias under LoRA is saved only if it was trained (`bias`).
    """
    return name.endswith(".base_layer.weight")


def is_second_copy(name: str) -> bool:
    """PEFT saves an embedding in modules_to_save under three names when the vocabulary was resized."""
    return ".modules_to_save." in name or ".original_module." in name
