"""The parameters of any model on disk, from the headers of its files, for types that config.json does not size."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hyperpod_ft.checkpoint.adapters.experts import OF_ONE
from hyperpod_ft.checkpoint.formats.model_directory import (
    OUTPUT,
    embedding,
    is_encoder_decoder,
    is_image_text,
    is_tied,
    language_names,
    of_language_model,
    quantization,
    without_predictors,
)
from hyperpod_ft.checkpoint.formats.safetensors_file import has_weights, read_model
from hyperpod_ft.planning.model_shape import attention_heads
from hyperpod_ft.planning.undivided.shape import Parameters, UndividedShape

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# of a layer, by the spelling of config.json
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_USED = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
_NUMBER = re.compile(r"\.\d+(?=\.)")
_EXPERT = re.compile(r"(?P<module>.+\.experts)\.\*\.(?P<part>[^.]+)\.weight")


def files_shape(directory: Path, config: Mapping[str, Any]) -> UndividedShape | None:
    """The shape of the language model in `directory`; `config`: its config.json.

    None without files, before stage download has decoded quantized ones, for encoder-decoders, and where the number of
    layers, or the embedding, is not found. Raises UserError for damaged files.
    """
    values = of_language_model(config)
    layers = _first(values, _LAYERS)
    if not has_weights(directory) or quantization(config) or is_encoder_decoder(config) or not layers:
        return None
    stored = without_predictors(config, {tensor.name: tensor for tensor in read_model(directory)})
    names = language_names(config, stored)
    tied = is_tied(config, names)
    shapes = {name: stored[name].shape for name in names if not (tied and name == OUTPUT)}
    first = embedding(shapes)
    if first is None and not is_image_text(config):
        first = _as_long_as(shapes, values.get("vocab_size"))
    if first is None:
        return None
    vocabulary, hidden = shapes[first]
    heads, experts = attention_heads(values) or 0, expert_count(values)
    return UndividedShape(
        model_type=str(values.get("model_type", "")),
        hidden=hidden,
        intermediate=0,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=_first(values, ("head_dim",)) or (hidden // heads if heads else 0),
        vocabulary=vocabulary,
        tied=tied,
        inventory=tuple(_joined(_inventory(shapes, experts), experts)),
        experts=experts,
        experts_used=_first(values, _USED),
        complete=False,
    )


def _as_long_as(shapes: Mapping[str, tuple[int, ...]], vocabulary: object) -> str | None:
    """The embedding, by its shape: some types have names of their own for it."""
    found = [name for name, shape in shapes.items() if len(shape) == 2 and shape[0] == vocabulary and name != OUTPUT]
    return found[0] if found else None


def expert_count(values: Mapping[str, Any]) -> int:
    """The number of experts of a layer that the config.json of a language model names; 0 without one."""
    return _first(values, EXPERT_COUNTS)


def _first(values: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    """The value of the first of the keys that has a number; 0 without one."""
    return next((values[key] for key in keys if isinstance(values.get(key), int)), 0)


def _inventory(shapes: Mapping[str, tuple[int, ...]], experts: int) -> list[Parameters]:
    alike = Counter((_NUMBER.sub(".*", name), tuple(shape)) for name, shape in shapes.items())
    return [
        Parameters(name, shape, count, of_experts=_is_of_experts(name, shape, experts))
        for (name, shape), count in alike.items()
    ]


def _is_of_experts(name: str, shape: tuple[int, ...], experts: int) -> bool:
    """Whether these are of one expert each, or of all experts of a layer together."""
    return experts > 0 and (".experts." in name or (len(shape) == 3 and shape[0] == experts))


def _joined(found: list[Parameters], experts: int) -> Iterator[Parameters]:
    """The same; those of one expert each become those of all experts of a layer, as transformers has them."""
    modules: dict[str, dict[str, Parameters]] = {}
    for each in found:
        match = _EXPERT.fullmatch(each.name)
        if match and experts:
            modules.setdefault(match["module"], {})[match["part"]] = each
        else:
            yield each
    for module, parts in modules.items():
        for name, spellings in OF_ONE.items():
            for spelling in spellings:
                if parts.keys() >= set(spelling):
                    yield _of_all(f"{module}.{name}", [parts.pop(part) for part in spelling], experts)
        for each in parts.values():
            yield _of_all(each.name, [each], experts)


def _of_all(name: str, of_one: list[Parameters], experts: int) -> Parameters:
    """What all experts of a layer have of matrices of one expert, joined along their outputs."""
    outputs, inputs = sum(each.shape[0] for each in of_one), of_one[0].shape[1:]
    return Parameters(name, (experts, outputs, *inputs), max(1, of_one[0].count // experts), of_experts=True)
