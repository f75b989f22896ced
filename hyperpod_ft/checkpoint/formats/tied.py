"""The embedding and the output layer of a language model, which may be one parameter under two names.

With transformers' `tie_word_embeddings` the files usually have the embedding only.
"""

from collections.abc import Collection, Mapping
from typing import Any

from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor

OUTPUT = "lm_head.weight"
# T5's embedding. Its encoder and decoder use it too; files may hold it again under their names.
SHARED, SHARED_ALIASES = "shared.weight", ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# Names of the embedding in transformers' other language models: Llama and most others, GPT-2, GPT-NeoX, BLOOM.
_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")


def embedding(names: Collection[str]) -> str | None:
    """The name of the embedding among a model's tensors; None unless there is exactly one."""
    if SHARED in names:
        return SHARED
    found = [name for name in names if name.endswith(tuple(f"{module}.weight" for module in _EMBEDDINGS))]
    return found[0] if len(found) == 1 else None


def is_tied(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """`config`: config.json, where a missing key means the default of the architecture."""
    stated = config.get("tie_word_embeddings")
    if config.get("model_type") == "t5":
        # transformers 5 always writes true, and here what the original key said: v1.0 scales, and ties
        return OUTPUT not in names or bool(config.get("scale_decoder_outputs", stated is not False))
    return bool(stated) if stated is not None else OUTPUT not in names and embedding(names) is not None


def with_tied_output(tensors: Mapping[str, LogicalTensor]) -> dict[str, LogicalTensor]:
    """A tied model's tensors under all their names: the output layer is the embedding."""
    name = embedding(tensors)
    return {**tensors, OUTPUT: tensors[name].renamed(OUTPUT)} if name else dict(tensors)
