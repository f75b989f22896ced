"""Memory of a training step of engine torch."""

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.degrees import Degrees
from hyperpod_ft.planning.memory import FP32, Kept, Memory, Part, activations, last_norm, tokens, width
from hyperpod_ft.planning.model_shape import ModelShape


def on_rank(config: RunConfig, degrees: Degrees, shape: ModelShape, part: Part) -> Memory:
    """FSDP2: everything is sharded over data parallelism, and gathered to compute.

    The vocabulary is not divided: the peak of the loss, in the backward pass, has log-probabilities and two gradients,
    all fp32.
    """
    training, data = config.training, degrees.data_parallel
    lora = training.method == "lora"
    adapters = part.trainable if lora else 0
    at_rest = part.parameters * (width(config) if lora else FP32) + adapters * FP32
    gathered = float(part.parameters + adapters)
    if training.gradient_checkpointing:
        # the current layer and the next, which is prefetched; embedding and output matrix stay gathered
        gathered = part.end_parameters + min(2, part.layers) * (gathered - part.end_parameters) / part.layers
    # fp32 gradients of earlier micro batches, not yet reduced
    waiting = FP32 if training.gradient_accumulation_steps > 1 else 0
    kept = Kept(outside=1.0, scores=config.model.attention != "sdpa")
    logits = part.last * tokens(config, degrees) * (last_norm(config, shape, kept) + shape.vocabulary * 3 * FP32)
    return Memory(
        weights=at_rest / data + gathered * width(config),
        gradients=part.trainable * (FP32 / data + waiting),
        optimizer=part.trainable * 2 * FP32 / data,
        activations=activations(config, degrees, shape, part, kept, logits),
        logits=logits,
    )
