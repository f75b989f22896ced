"""Operations of a training step of engine torch on one token, with those that activation checkpointing repeats.

Otherwise they are counted as in engines/flops.py, but without norms, biases and adapters, which are less than one
percent of a model.
"""

from dataclasses import dataclass

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.model_shape import ModelShape


@dataclass(frozen=True)
class TokenOperations:
    """Forward, backward, and what is computed again."""

    layer: float
    head: float  # the output matrix; an embedding is looked up, which is not counted


def token_operations(config: RunConfig, shape: ModelShape) -> TokenOperations:
    """2 for each element of a matrix forward, 2 for the gradient of its input, and 2 for its own if it is trained.

    Attention over T positions and a width q of all query heads has 4 q T forward and twice that backward.
    """
    training = config.training
    trained, again = training.method == "full", training.activation_checkpointing == "full"
    attention = 4 * shape.query_width * config.dataset.max_length
    matrices = sum(linear.inputs * linear.outputs for linear in shape.linears)
    forward = 2 * matrices + attention
    backward = 2 * matrices * (1 + trained) + 2 * attention
    return TokenOperations(
        layer=forward * (1 + again / training.activation_checkpointing_every) + backward,
        head=2 * shape.vocabulary * shape.hidden * (2 + trained),
    )
