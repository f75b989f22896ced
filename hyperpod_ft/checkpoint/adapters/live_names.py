"""The names of a base's tensors in the live model, by which an adapter names what it changes."""

import re
from collections.abc import Collection, Iterable, Mapping

from hyperpod_ft.checkpoint.adapters import experts
from hyperpod_ft.checkpoint.adapters.lora_config import PREFIX
from hyperpod_ft.checkpoint.formats.model_directory import OUTPUT
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor

_CONTAINERS = re.compile(r"^(?:(?:model|language_model|text_model)\.)+")


def modules(tensors: Iterable[LogicalTensor]) -> set[str]:
    """The modules of the live model that have factors among an adapter's tensors."""
    named = {tensor.name.removeprefix(PREFIX).split(".lora_")[0] for tensor in tensors if ".lora_" in tensor.name}
    return {experts.module_of(name)[0] for name in named}


def with_live_names(modules: Iterable[str], stored: Mapping[str, LogicalTensor]) -> dict[str, LogicalTensor]:
    """A base's tensors by the live model's names; `modules`: names of some of its modules.

    The names of a model saved without its head lack a prefix, which transformers adds when loading. The language model
    of an image-text model has several names: one in published files, one in the live model, one when it is loaded
    alone.
    """
    if not any(f"{module}.weight" in stored for module in modules):
        plain = {_plain(name): name for name in stored}
        known = [module for module in modules if f"{_plain(module)}.weight" in plain]
        for module in sorted(known, key=lambda module: f"{_plain(module)}.weight" == OUTPUT):
            before, prefix = (_lead(name) for name in (plain[f"{_plain(module)}.weight"], module))
            return {_live(name, before, prefix): tensor for name, tensor in stored.items()}
    prefix = prefix_of_headless(modules, stored)
    return {f"{prefix}{name}": tensor.renamed(f"{prefix}{name}") for name, tensor in stored.items()}


def prefix_of_headless(modules: Iterable[str], stored: Collection[str]) -> str:
    """What transformers puts before the names of a model that was saved without its head; empty for other models."""
    for module in modules:
        first, _, rest = module.partition(".")
        if f"{rest}.weight" in stored and not any(name.startswith(f"{first}.") for name in stored):
            return f"{first}."
    return ""


def _plain(name: str) -> str:
    """A name in an image-text model's language model, without what leads to that; other names keep a part that differs.

    >>> _plain("model.language_model.layers.0.mlp"), _plain("language_model.model.layers.0.mlp")
    ('layers.0.mlp', 'layers.0.mlp')
    """
    return _CONTAINERS.sub("", name)


def _lead(name: str) -> str:
    return name.removesuffix(_plain(name))


def _live(name: str, before: str, prefix: str) -> str:
    """`before`, `prefix`: what leads to the decoder in the files, and in the live model."""
    plain = _plain(name)
    if plain == OUTPUT:
        return plain
    return prefix + plain if _lead(name) == before else name
