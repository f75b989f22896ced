"""The embedding and the output layer of a language model, which may be one parameter under two names.

transformers' `tie_word_embeddings`: the files then hold the embedding only, as a rule.
"""

from collections.abc import Collection, Mapping
from typing import Any

from hyperpod_ft.checkpoint.tensors.layout import LogicalTensor

OUTPUT = "lm_head.weight"
# What transformers' language models call their embedding: Llama and most others, GPT-2, GPT-NeoX, BLOOM.
_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")


def embedding(names: Collection[str]) -> str | None:
    """The name of the embedding among a model's tensors; None when there is none, or several."""
    found = [name for name in names if name.endswith(tuple(f"{module}.weight" for module in _EMBEDDINGS))]
    return found[0] if len(found) == 1 else None


def is_tied(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """`config`: what config.json holds. It leaves the key out where it has the default of its architecture."""
    told = config.get("tie_word_embeddings")
    return bool(told) if told is not None else OUTPUT not in names and embedding(names) is not None


def with_tied_output(tensors: Mapping[str, LogicalTensor]) -> dict[str, LogicalTensor]:
    """A tied model's tensors under all their names: the output layer is the embedding."""
    name = embedding(tensors)
    return {**tensors, OUTPUT: tensors[name].renamed(OUTPUT)} if name else dict(tensors)
