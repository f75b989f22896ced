"""Model FLOPs of training a token: what the mathematics asks for, whatever the hardware does besides.

A dense decoder multiplies each token with every matrix: 2 operations a parameter forward, 2 for the gradient of the
matrix's input and 2 for that of the matrix itself (Kaplan et al., arXiv:2001.08361, section 2.1). A frozen matrix, as
those beside LoRA factors, has no gradient of its own: 4 instead of 6. Attention over T positions adds
12 * L * H * Q * T for L layers of H heads of size Q (Chowdhery et al., arXiv:2204.02311, appendix B), trained or not,
since gradients flow through it; neither the causal mask nor the borders of packed documents are deducted, as there.

Model FLOPs leave out what gradient checkpointing computes again, so that utilization says what training got for the
machine's time.
"""

from collections.abc import Mapping
from typing import Any

_NEEDED = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads")
# a token passes through some of the experts only
_MIXTURES = ("num_experts", "num_local_experts", "n_routed_experts")


def flops_per_token(
    model_config: Mapping[str, Any],
    total_parameters: int,
    trainable_parameters: int,
    sequence_length: int,
    *,
    tied: bool,
) -> float | None:
    """Operations to train one token forward and backward; None for families whose `config.json` is another's.

    `model_config` is the parsed `config.json` of a Hugging Face model. Both numbers of parameters are those of the
    whole model with its adapters; trained is either all of it, or the adapters. `tied`: the embedding is the output
    matrix too, and counted once.
    """
    if not all(isinstance(model_config.get(key), int) for key in _NEEDED) or any(
        model_config.get(key) for key in _MIXTURES
    ):
        return None
    hidden, vocabulary, layers, heads = (int(model_config[key]) for key in _NEEDED)
    head_size = int(model_config.get("head_dim") or hidden // heads)
    # an embedding is looked up, not multiplied, unless it is the output matrix too
    lookup = 0 if tied else vocabulary * hidden
    multiplied = total_parameters - lookup
    trained = min(trainable_parameters, multiplied)
    attention = 12 * layers * heads * head_size * sequence_length
    return float(4 * (multiplied - trained) + 6 * trained + attention)
