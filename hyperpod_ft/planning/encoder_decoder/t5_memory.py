"""Memory of a training step of a T5 on a rank: what differs from decoders.

Those are in planning/memory.py and planning/torch/memory.py. Layers are counted as if all had the same size, though
those of the decoder have one more attention.
"""

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.degrees import Degrees
from hyperpod_ft.planning.encoder_decoder.t5_shape import T5Shape
from hyperpod_ft.planning.lora_targets import target_names
from hyperpod_ft.planning.memory import FP32, PipelineStageSize, element_bytes, kept_by_layers


def stage_size(config: RunConfig, degrees: Degrees, shape: T5Shape) -> PipelineStageSize:
    """The whole model, after tensor parallelism."""
    lora, tensor, targets = config.lora, degrees.tensor_parallel, target_names(config.lora, shape.model_type)
    linears = {name: sum(shape.times(name)) * sides[0] * sides[1] for name, sides in shape.matrices.items()}
    ends = shape.end_parameters(tensor)
    parameters = shape.layers_parameters - sum(linears.values()) * (tensor - 1) // tensor
    adapters = sum(shape.adapters(targets, lora.r)) + lora.dora * sum(
        sum(shape.times(name)) * outputs for name, (_, outputs) in shape.matrices.items() if name in targets
    )
    quantized = sum(linears[name] for name in linears if name in targets and lora.quantization != "none")
    return PipelineStageSize(
        layers=shape.layers,
        layer_parameters=parameters // shape.layers,
        end_parameters=ends,
        quantized=quantized,
        trainable=adapters if config.training.method == "lora" else parameters + ends,
        in_flight=1,
        last=True,
    )


def activations(config: RunConfig, degrees: Degrees, shape: T5Shape, logits: float) -> float:
    """Bytes of the activations kept for the backward pass. `logits`: bytes that the loss adds to them.

    Of accelerators, which compile layers and make a bias of [rows, heads, length, length] for each stack.
    """
    training, dataset, element = config.training, config.dataset, element_bytes(config)
    rows, source = training.micro_batch_size, training.micro_batch_size * dataset.max_length
    target = rows * (dataset.max_target_length or 0)
    heads = shape.heads // degrees.tensor_parallel
    scores = rows * heads * (dataset.max_length**2 + (dataset.max_target_length or 0) ** 2)
    # and their gradients, where they are trained
    biases = (2 if training.method == "full" else 1) * element * scores
    norm = shape.hidden * (FP32 + (1 + (training.method == "full")) * element)
    dropped = shape.hidden  # a mask of the output of attention and of MLP, one byte each
    queries, tensor = element * shape.query_width / degrees.tensor_parallel, degrees.tensor_parallel
    units = (element * (4 if shape.gated else 2) + 1) * shape.intermediate / tensor
    own = 2 * norm + 2 * dropped + 5 * queries + units  # attention: q, k, v, and the output twice
    cross = norm + dropped + 3 * queries  # keys and values are the encoder's tokens
    whole = {"encoder": source * own, "decoder": target * (own + cross) + source * 2 * queries}
    given = {"encoder": source * shape.hidden * element, "decoder": target * shape.hidden * element}
    counts = {"encoder": shape.encoder_layers, "decoder": shape.decoder_layers}
    # the second attention: query, output and what `o` makes of it; keys and values
    cross_products = element * shape.hidden + 2 * queries
    products = {
        "encoder": source * _products(shape, element, tensor),
        "decoder": target * (_products(shape, element, tensor) + cross_products) + source * 2 * queries,
    }
    kept = biases + sum(
        kept_by_layers(config, count, whole[stack], given[stack], products[stack]) for stack, count in counts.items()
    )
    if training.activation_checkpointing == "none":
        return kept
    # one layer is recomputed, after the loss has freed its memory
    return kept + max(0.0, max(whole.values()) - logits)


def _products(shape: T5Shape, element: int, tensor: int) -> float:
    """Bytes per token of a layer's matrix products, and of attention."""
    inside = 4 * shape.query_width + (2 if shape.gated else 1) * shape.intermediate
    return element * (2 * shape.hidden + inside / tensor)
