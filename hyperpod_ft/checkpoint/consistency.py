"""Whether a configuration and the tensors beside it belong together, as far as names and shapes tell: a line per fault.

What transformers and PEFT would do with a mismatch ranges from an error to random weights with a warning.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hyperpod_ft.checkpoint import lora, model_directory
from hyperpod_ft.checkpoint.layout import DTYPE_OF_TORCH_NAME, FLOATING, LogicalTensor
from hyperpod_ft.checkpoint.reading import Reader
from hyperpod_ft.errors import UserError

Tensors = Mapping[str, LogicalTensor]

_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<kind>embedding_)?(?P<side>[AB])(?P<rest>\.weight)?")


def model_faults(directory: Path, tensors: Tensors) -> Iterator[str]:
    """Of a Hugging Face model. Raises UserError when config.json cannot be read."""
    config = model_directory.read_config(directory)
    where = directory / model_directory.CONFIG
    wanted = (config.get("vocab_size"), config.get("hidden_size"))
    for name in (_EMBEDDING, _OUTPUT):
        if None not in wanted and name in tensors and tensors[name].shape != wanted:
            yield f"{where}: vocab_size and hidden_size are {list(wanted)}, {name} is {list(tensors[name].shape)}"
    tied = config.get("tie_word_embeddings")  # left out, its default depends on the architecture
    if _EMBEDDING in tensors and _OUTPUT not in tensors and tied is False and _is_causal(config):
        yield f"{where}: tie_word_embeddings is false, but there is no {_OUTPUT}"
    if {_EMBEDDING, _OUTPUT} <= tensors.keys() and tied and not _equal(tensors[_EMBEDDING], tensors[_OUTPUT]):
        yield f"{where}: tie_word_embeddings is true, but {_OUTPUT} differs from {_EMBEDDING}: it would be lost"
    yield from _dtype_faults(config, where, tensors)
    layers = {int(found[1]) for name in tensors if (found := _LAYER.match(name))}
    count = config.get("num_hidden_layers")
    # further layers are there for a reason: some models predict several tokens with them
    if layers and type(count) is int and (missing := sorted(set(range(count)) - layers)):
        yield f"{where}: num_hidden_layers is {count}, but there are no weights of layers {missing}"


def _is_causal(config: Mapping[str, Any]) -> bool:
    return any(str(name).endswith("ForCausalLM") for name in config.get("architectures") or ())


def _equal(left: LogicalTensor, right: LogicalTensor) -> bool:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    with Reader() as reader:
        return all(map(np.array_equal, reader.blocks(left), reader.blocks(right)))


def _dtype_faults(config: Mapping[str, Any], where: Path, tensors: Tensors) -> Iterator[str]:
    told = config.get("dtype", config.get("torch_dtype"))
    held = sorted({tensor.dtype for tensor in tensors.values()} & FLOATING)
    # norms and gates are often kept in a wider dtype than the rest; quantized weights have their own
    wanted = None if "quantization_config" in config else DTYPE_OF_TORCH_NAME.get(str(told))
    if wanted and held and wanted not in held:
        yield f"{where}: dtype is {told}, the tensors are {', '.join(held)}"


def adapter_faults(directory: Path, tensors: Tensors) -> Iterator[str]:
    """Of a PEFT adapter: LoRA factors without partner, or of another rank. Raises UserError as `model_faults` does."""
    where = directory / lora.CONFIG
    try:
        config = json.loads(where.read_text(encoding="utf-8"))
        if config.get("peft_type") != "LORA":
            return
        rank, patterns = config["r"], config.get("rank_pattern") or {}
        for name, tensor in tensors.items():
            if factor := _FACTOR.fullmatch(name):
                other = "B" if factor["side"] == "A" else "A"
                partner = f"{factor['module']}.lora_{factor['kind'] or ''}{other}{factor['rest'] or ''}"
                if partner not in tensors:
                    yield f"{directory / lora.WEIGHTS}: {name} has no lora_{other}"
                wanted = _rank(factor["module"], rank, patterns)
                if tensor.shape["AB".index(factor["side"]) :][:1] != (wanted,):
                    yield f"{where}: the rank is {wanted}, but {name} is {list(tensor.shape)}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, re.error) as error:
        raise UserError(f"{where}: is no LoRA configuration: {error!r}", "make the adapter again") from error


def _rank(module: str, rank: int, patterns: Mapping[str, int]) -> int:
    """As PEFT reads rank_pattern: the first whose regular expression ends the module's name (get_pattern_key)."""
    return next((value for key, value in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", module)), rank)
