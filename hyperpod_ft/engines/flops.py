"""Model FLOPs of training one token: the operations the model requires, whatever the hardware executes.

A dense decoder multiplies each token by every matrix: per parameter, 2 operations forward, 2 for the gradient of the
matrix's input and 2 for that of the matrix itself (Kaplan et al., arXiv:2001.08361, section 2.1). A frozen matrix, such
as one with LoRA factors, needs no weight gradient: 4 instead of 6. Attention over T positions adds
12 * L * H * Q * T for L layers of H heads of size Q (Chowdhery et al., arXiv:2204.02311, appendix B), trained or not,
since gradients flow through it; as in that paper, nothing is deducted for the causal mask
or for the borders of packed documents.

Tokens of a T5's encoder pass its layers and the key and value matrices of the decoder's attention to them; tokens of
the decoder its other matrices and the output matrix. Attention over k keys adds 12 * H * Q * k operations to each
query.

Model FLOPs exclude what gradient checkpointing recomputes, so utilization measures useful work.
"""

from collections.abc import Mapping
from typing import Any

from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.planning.families import family_of
from hyperpod_ft.planning.t5_shape import T5Shape

_NEEDED = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads")
_POSITIONS = "max_position_embeddings"
# mixture of experts: a token passes through only some of them
_MIXTURES = ("num_experts", "num_local_experts", "n_routed_experts")


def flops_per_token(
    model_config: Mapping[str, Any],
    total_parameters: int,
    trainable_parameters: int,
    sequence_length: int,
    *,
    tied: bool,
) -> float | None:
    """Operations to train on one token, forward and backward; None for model families with other keys, or with experts.

    `model_config` is the parsed `config.json` of a Hugging Face model. Both parameter counts cover the
    whole model with its adapters; trainable are either all parameters or the adapters. `tied`: the embedding is also
    the output matrix, and is counted once.
    """
    family = family_of(str(model_config.get("model_type", "")))
    spelled = family.attribute_map if family else {}
    found = {key: model_config.get(spelled.get(key, key)) for key in (*_NEEDED, _POSITIONS)}
    if not all(isinstance(found[key], int) for key in _NEEDED) or any(model_config.get(key) for key in _MIXTURES):
        return None
    hidden, vocabulary, layers, heads = (int(found[key] or 0) for key in _NEEDED)
    head_size = int(model_config.get("head_dim") or hidden // heads)
    # an embedding is looked up, not multiplied, unless it is also the output matrix
    lookup = 0 if tied else vocabulary * hidden
    if family and family.positions:
        lookup += int(found[_POSITIONS] or 0) * hidden
    multiplied = total_parameters - lookup
    trained = min(trainable_parameters, multiplied)
    attention = 12 * layers * heads * head_size * sequence_length
    return float(4 * (multiplied - trained) + 6 * trained + attention)


def t5_flops_per_token(shape: T5Shape, dataset: Dataset, targets: frozenset[str], rank: int | None) -> float:
    """Operations to train on a row, forward and backward, divided by its positions in both parts.

    `rank`: of the adapters on `targets`; None when all parameters are trained.
    """
    assert dataset.max_target_length is not None
    source, target = dataset.max_length, dataset.max_target_length
    of_source = of_target = 0
    for name, (inputs, outputs) in shape.matrices.items():
        encoder, decoder = shape.times(name)
        crossing = shape.decoder_layers if name in ("k", "v") else 0
        of_source += (encoder + crossing) * inputs * outputs
        of_target += (decoder - crossing) * inputs * outputs
    of_target += shape.vocabulary * shape.hidden
    each = 6 if rank is None else 4  # a frozen matrix needs no weight gradient
    operations = each * (source * of_source + target * of_target)
    if rank is not None:
        adapters = shape.adapters(targets, rank)
        operations += 6 * (source * adapters[0] + target * adapters[1])
    pairs = shape.encoder_layers * source**2 + shape.decoder_layers * (target**2 + target * source)
    return (operations + 12 * shape.query_width * pairs) / (source + target)
