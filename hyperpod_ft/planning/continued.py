"""Training that continues an adapter: what section `lora` of the run file then is."""

import re
from typing import Any

from hyperpod_ft.checkpoint.adapters.lora_config import CONFIG, AdapterConfig, names_in_language_model
from hyperpod_ft.config import run_file
from hyperpod_ft.config.fields import shown
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError

_WHERE = "model.adapter.source"
_MERGE = "merge it into its base (hyperpod-ft merge), and train that model"
_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
_WEIGHT = ".weight"

# The keys of section `lora` whose values are those of an adapter that training continues. A run file may repeat them.
OF_ADAPTER = ("r", "alpha", "rslora", "dora", "target_modules", "target_parameters", "modules_to_save")


def continued(config: RunConfig, adapter: AdapterConfig) -> RunConfig:
    """The run file with the adapter's values in section `lora`, where it left them out.

    Raises UserError when it has other ones, or training cannot continue such an adapter.
    """
    found = _values(adapter)
    given = config.differing()
    for key, value in found.items():
        own = getattr(config.lora, key)
        if f"lora.{key}" in given and _comparable(own) != _comparable(value):
            raise UserError(
                f"lora.{key}: is {_shown(own)}, and {_shown(value)} in the {CONFIG} of model.adapter",
                "leave it out, or leave model.adapter out to train a new adapter",
            )
    values = config.model_dump()
    values["lora"] |= found
    return run_file.validate(values, "with the values of model.adapter")


def _arranges_alike(version: str | None) -> bool:
    """Whether this version of PEFT arranges the factors of experts as is written here: since 0.19.1."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version or "")
    return found is not None and tuple(map(int, found.groups())) >= (0, 19, 1)


def _comparable(value: Any) -> Any:
    return frozenset(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    return shown(list(value) if isinstance(value, tuple) else value)


def _values(adapter: AdapterConfig) -> dict[str, Any]:
    """Section `lora`'s values of an adapter. Raises UserError for one that this section cannot describe."""
    plain = ("rank_pattern", "alpha_pattern", "layers_to_transform", "exclude_modules", "lora_bias")
    others = [*adapter.unsupported, *(key for key in plain if getattr(adapter, key))]
    if adapter.bias != "none":
        others.append(f"bias {adapter.bias}")
    targets = adapter.target_modules
    if isinstance(targets, str):  # as is written for image-text models
        targets = names_in_language_model(targets)
        if not targets:
            others.append("target_modules that is a pattern")
    experts = [name for name in adapter.target_parameters if not name.endswith(_WEIGHT)]
    if experts and not _arranges_alike(adapter.peft_version):
        others.append(f"target_parameters as PEFT {adapter.peft_version or 'before 0.18'} arranges them")
    if others:
        raise UserError(f"{_WHERE}: its {CONFIG} has what training cannot continue: {', '.join(others)}", _MERGE)
    # a linear layer whose weight is named, as PEFT needs it beside experts
    weights = [name.removesuffix(_WEIGHT) for name in adapter.target_parameters if name.endswith(_WEIGHT)]
    modules = (*targets, *weights)
    for name in (*modules, *experts, *adapter.modules_to_save):
        if not _NAME.fullmatch(name):
            raise UserError(f"{_WHERE}: its {CONFIG} has {shown(name)}, which names no module", _MERGE)
    return {
        "r": adapter.r,
        "alpha": adapter.lora_alpha,
        "rslora": adapter.use_rslora,
        "dora": adapter.use_dora,
        "target_modules": tuple(sorted(modules)),
        "target_parameters": tuple(sorted(experts)),
        "modules_to_save": tuple(sorted(adapter.modules_to_save)),
    }
