"""Memory of a training step of engine torch, and the sharding that fits."""

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.degrees import Degrees
from hyperpod_ft.planning.memory import (
    FP32,
    GIB,
    Kept,
    Memory,
    Part,
    activations,
    available,
    last_norm,
    parts,
    tokens,
    width,
)
from hyperpod_ft.planning.model_shape import ModelShape
from hyperpod_ft.planning.sharding import BUCKET_BYTES, Sharding, candidates

# Positions whose logits are in memory at once. 256 to 1,024 were as fast, on a CPU; 64 were not.
LOSS_BLOCK = 512
_QUANTIZED = 4.5 / 8  # NF4: 4 bits, and an fp32 scale for 64 parameters
# Bytes of both moments; int8 has a scale for 256 elements of each.
_MOMENTS = {"fp32": 8.0, "bf16": 4.0, "int8": 2 + 8 / 256}


def choose(config: RunConfig, degrees: Degrees, shape: ModelShape | None) -> Sharding:
    """The first of the candidates that fits, else the smallest. `shape` None: the model's size is unknown.

    Without accelerators everything fits; an unknown model gets the sharding that needs the least memory.
    """
    possible = list(candidates(config, degrees))
    room = available(config)
    if not room:
        return possible[0]
    if shape is None:
        return possible[-1]
    totals = [total(config, degrees, shape, sharding) for sharding in possible]
    fitting = (sharding for sharding, needed in zip(possible, totals, strict=True) if needed <= room)
    return next(fitting, possible[totals.index(min(totals))])


def explain(config: RunConfig, degrees: Degrees, shape: ModelShape | None) -> str:
    """The chosen sharding, and why it is not a faster one, in one line."""
    chosen = choose(config, degrees, shape)
    room, faster = available(config), []
    if shape and room:
        for sharding in candidates(config, degrees):
            if sharding == chosen:
                break
            faster.append(f"{sharding} needs {total(config, degrees, shape, sharding) / GIB:.1f} GiB")
    return f"{chosen} ({', '.join(dict.fromkeys(faster))})" if faster else str(chosen)


def total(config: RunConfig, degrees: Degrees, shape: ModelShape, sharding: Sharding) -> float:
    """Bytes on the fullest rank."""
    return max(on_rank(config, degrees, shape, part, sharding).total for part in parts(config, degrees, shape))


def on_rank(config: RunConfig, degrees: Degrees, shape: ModelShape, part: Part, sharding: Sharding) -> Memory:
    """Memory of a rank under a sharding.

    The vocabulary is not divided, but the loss has the logits of LOSS_BLOCK positions only, in fp32, and in bf16 before
    and after that; and the hidden states' gradient.
    """
    element, count = width(config), tokens(config, degrees)
    # query, key, value; and the output, as computed and as o_proj's input
    attention = element * (3 * shape.queries + 2 * shape.keys)
    kept = Kept(outside=1.0, attention=attention, normalized=config.training.method == "full")
    block = min(count, LOSS_BLOCK) * shape.vocabulary * (FP32 + (2 * element if element < FP32 else 0))
    logits = part.last * (count * (last_norm(config, shape, kept) + shape.hidden * element) + block)
    return Memory(
        weights=_weights(config, part, sharding),
        gradients=_gradients(config, degrees, part, sharding),
        optimizer=_optimizer(config, part, sharding),
        activations=activations(config, degrees, shape, part, kept, logits),
        logits=logits,
    )


def _weights(config: RunConfig, part: Part, sharding: Sharding) -> float:
    lora, element = config.training.method == "lora", width(config)
    adapters = part.trainable if lora else 0
    quantized = part.quantized * _QUANTIZED  # whole on each rank
    base = part.parameters - part.quantized
    if not sharding.by_layer:
        return base * element + adapters * FP32 + quantized
    # sharded weights are fp32 where they are trained
    at_rest = base * (element if lora else FP32) + adapters * FP32
    parameters = float(base + adapters)
    layers = parameters - part.end_parameters
    if sharding.mode == "zero3":
        # the current bucket of layers and the next, which is prefetched; embedding and output matrix stay gathered
        in_bucket = max(1, int(BUCKET_BYTES / (at_rest / parameters * layers / part.layers)))
        layers *= min(1.0, 2 * in_bucket / part.layers)
    on_device = 0.0 if sharding.offload == "parameters" else at_rest / sharding.shard_ranks
    return on_device + (layers + part.end_parameters) * element + quantized


def _gradients(config: RunConfig, degrees: Degrees, part: Part, sharding: Sharding) -> float:
    """Gradients are fp32. Whole ones are kept until they are reduced, in the last backward pass of a step."""
    whole, ranks = float(part.trainable * FP32), sharding.shard_ranks
    accumulated = config.training.gradient_accumulation_steps > 1
    if not sharding.by_layer:
        reduced = 0.0 if sharding.offload != "none" else whole / ranks
        return whole if accumulated else max(reduced, min(whole, 2 * BUCKET_BYTES))
    # partial sums, which are exchanged between the groups of shard ranks once a step
    partial = whole / ranks if accumulated and ranks < degrees.data_parallel else 0.0
    return partial + (0.0 if sharding.offload == "parameters" else whole / ranks)


def _optimizer(config: RunConfig, part: Part, sharding: Sharding) -> float:
    """Moments, and fp32 weights where those that compute are bf16 (with FSDP2 they are the sharded weights)."""
    if sharding.offload != "none":
        return 0.0
    masters = config.training.method == "full" and width(config) < FP32 and not sharding.by_layer
    each = _MOMENTS[config.training.optimizer_state] + (FP32 if masters else 0)
    return part.trainable * each / sharding.shard_ranks
