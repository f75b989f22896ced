"""Memory of a training step of engine torch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.degrees import Degrees, copies_over_context
from hyperpod_ft.planning.encoder_decoder import t5_memory
from hyperpod_ft.planning.encoder_decoder.t5_shape import T5Shape
from hyperpod_ft.planning.memory import (
    FP32,
    KeptTensors,
    Memory,
    PipelineStageSize,
    activations,
    element_bytes,
    in_fp32_too,
    last_norm,
    pipeline_stage_sizes,
    tokens,
)
from hyperpod_ft.planning.model_shape import ModelShape
from hyperpod_ft.planning.torch import pipeline_cut, pipeline_schedule
from hyperpod_ft.planning.torch.sequence_parallel import has_sequence_parallel
from hyperpod_ft.planning.torch.sharding import BUCKET_BYTES, Sharding

# Positions whose logits are in memory at once. 256 to 1,024 were as fast, on a CPU; 64 were not.
LOSS_BLOCK = 256
NF4_BYTES = 4.5 / 8  # bytes of a parameter in NF4: 4 bits, and an fp32 scale for 64
# Bytes of both moments; int8 has a scale for 256 elements of each.
_MOMENTS = {"fp32": 8.0, "bf16": 4.0, "int8": 2 + 8 / 256}


def bytes_on_fullest_rank(
    config: RunConfig, degrees: Degrees, shape: ModelShape, stages: Sequence[PipelineStageSize], sharding: Sharding
) -> float:
    """The memory that the fullest rank needs. `stages`: from `stage_sizes`."""
    # of identical ranks of a pipeline, the first has the most micro batches in memory
    different = {replace(stage, in_flight=0): stage for stage in reversed(stages)}
    return max(memory_on_rank(config, degrees, shape, stage, sharding).total for stage in different.values())


def stage_sizes(config: RunConfig, degrees: Degrees, shape: ModelShape) -> Iterator[PipelineStageSize]:
    """The size of each pipeline rank's stage."""
    if isinstance(shape, T5Shape):
        yield t5_memory.stage_size(config, degrees, shape)
    else:
        layers = pipeline_cut.layers_of_ranks(config, degrees, shape)
        in_flight = pipeline_schedule.in_flight(config, degrees)
        yield from pipeline_stage_sizes(config, degrees, shape, layers_of=layers, in_flight=in_flight)


def memory_on_rank(
    config: RunConfig, degrees: Degrees, shape: ModelShape, stage: PipelineStageSize, sharding: Sharding
) -> Memory:
    """Memory of a rank under a sharding.

    The loss has the logits of LOSS_BLOCK positions only, in fp32, and if the model computes in bf16, in bf16 too; and
    the hidden states' gradient. Tensor-parallel ranks have as many more positions and as much less of the vocabulary.
    Sequence parallelism divides what lies between attention and MLP; their inputs are gathered.
    """
    element, count, ranks = element_bytes(config), tokens(config, degrees), degrees.tensor_parallel
    # what a compiler keeps of a norm is its choice: the most is counted
    compiled = config.training.compiles(config.instance.has_accelerators)
    kept = KeptTensors(
        outside_share=1 / ranks if has_sequence_parallel(config, degrees) else 1.0,
        input_share=1.0,
        attention=_attention(config, degrees, shape),
        # a fused gate is activated by transformers' code
        activated=any(len(parts) == 2 for parts in shape.family.columns.values()),
        normalized=compiled and config.training.method == "full",
        exchanged=element * (2 * shape.query_width + 2 * shape.key_width * key_value_copies(degrees, shape))
        if degrees.context_parallel > 1
        else 0.0,
        norm_input=FP32 if compiled else element,
    )
    if isinstance(shape, T5Shape):
        count = config.training.micro_batch_size * (config.dataset.max_target_length or 0)
    block = min(count, LOSS_BLOCK * ranks) * shape.vocabulary_on_rank(ranks) * in_fp32_too(config)
    of_batch = count * (last_norm(config, shape, kept) + shape.hidden * element)
    logits = stage.last * (of_batch + block)
    return Memory(
        weights=_weights(config, stage, sharding),
        gradients=_gradients(config, degrees, shape, stage, sharding),
        optimizer=_optimizer(config, stage, sharding),
        activations=(
            t5_memory.activations(config, degrees, shape, logits)
            if isinstance(shape, T5Shape)
            else activations(config, degrees, shape, stage, kept, logits)
            + _pipeline(config, degrees, shape, stage, of_batch)
        ),
        logits=logits,
    )


def _pipeline(
    config: RunConfig, degrees: Degrees, shape: ModelShape, stage: PipelineStageSize, of_batch: float
) -> float:
    """Bytes that a pipeline adds. `of_batch`: what the loss keeps of a micro batch."""
    if degrees.pipeline_parallel == 1:
        return 0.0
    # torch has a tensor for each stage's input and its gradient, and for each micro batch
    stages, micro_batches = pipeline_schedule.stages_per_rank(config), config.training.gradient_accumulation_steps
    hidden = tokens(config, degrees) * shape.hidden * element_bytes(config)
    received = 2 * stages * micro_batches * hidden
    if config.parallelism.pipeline_schedule != "gpipe" or not stage.last:
        return received
    # the loss computes its gradients in the forward pass: that of the output matrix waits for the backward pass
    matrix = shape.vocabulary_on_rank(degrees.tensor_parallel) * shape.hidden * FP32
    head = matrix if config.training.method == "full" else 0
    return received + (stage.in_flight - 1) * (of_batch + head)


def _attention(config: RunConfig, degrees: Degrees, shape: ModelShape) -> float:
    """Bytes per token: query, key, value; and the output, as computed and as o_proj's input."""
    element = element_bytes(config)
    keys = shape.key_width * key_value_copies(degrees, shape)
    total: float = element * (3 * shape.query_width + 2 * keys)
    softmax = in_fp32_too(config)  # computed in fp32
    fused = any(len(parts) == 3 or "triples" in parts for parts in shape.family.columns.values())
    if fused and not shape.positions:
        # the value keeps all that its linear computed, besides queries and keys that were rotated
        total += element * (shape.query_width + keys)
    if shape.softcap:
        # no kernel caps scores: they are there after tanh; keys and values are repeated
        total += (element + softmax) * shape.heads * config.dataset.max_length + element * 2 * shape.query_width
    elif config.instance.is_neuron:
        # a dense mask separates the documents of a row; it is not known whether the compiler avoids the softmax
        total += softmax * shape.heads * config.dataset.max_length
    return total


def key_value_copies(degrees: Degrees, shape: ModelShape) -> int:
    """How many of the ranks that share a row hold each key/value head in attention."""
    return copies_over_context(max(1, shape.kv_heads // degrees.tensor_parallel), degrees.context_parallel)


def _weights(config: RunConfig, stage: PipelineStageSize, sharding: Sharding) -> float:
    element, adapters = element_bytes(config), _adapter_parameters(config, stage)
    base, quantized = stage.parameters - stage.quantized, stage.quantized * NF4_BYTES
    if not sharding.by_layer:
        return base * element + adapters * FP32 + quantized
    layers = base + adapters - stage.end_parameters
    bucket = _weights_in_bucket(config, stage)
    # zero3 holds the current bucket, the next one, which is prefetched, and one as received. zero2 receives its weights
    # before any gradient exists. Embedding and output matrix stay gathered
    gathered = layers if sharding.mode == "zero2" else min(layers + bucket, 3 * bucket)
    on_device = 0.0 if sharding.offload == "parameters" else _at_rest(config, stage) / sharding.shard_ranks
    return on_device + (gathered + stage.end_parameters) * element + quantized


def _adapter_parameters(config: RunConfig, stage: PipelineStageSize) -> int:
    return stage.trainable if config.training.method == "lora" else 0


def _at_rest(config: RunConfig, stage: PipelineStageSize) -> int:
    """Bytes of all weights as FSDP2 stores them: fp32 where they are trained. It does not store those in 4 bits."""
    element = element_bytes(config) if config.training.method == "lora" else FP32
    return (stage.parameters - stage.quantized) * element + _adapter_parameters(config, stage) * FP32


def _weights_in_bucket(config: RunConfig, stage: PipelineStageSize) -> float:
    layers = stage.parameters - stage.quantized + _adapter_parameters(config, stage) - stage.end_parameters
    return _layers_in_bucket(config, stage) / stage.layers * layers


def _layers_in_bucket(config: RunConfig, stage: PipelineStageSize) -> int:
    shared = stage.parameters - stage.quantized + _adapter_parameters(config, stage)
    layer = _at_rest(config, stage) / shared * stage.layer_parameters
    return max(1, min(stage.layers, int(BUCKET_BYTES / layer)))


def _gradients(
    config: RunConfig, degrees: Degrees, shape: ModelShape, stage: PipelineStageSize, sharding: Sharding
) -> float:
    """Gradients are fp32. While a bucket is reduced, it is in memory twice: as computed and as sent.

    zero2 also holds weights as received during the forward pass; they are released before the gradients exist.
    """
    whole, ranks = float(stage.trainable * FP32), sharding.shard_ranks
    accumulated = config.training.gradient_accumulation_steps > 1
    on_host = sharding.offload != "none"
    if not sharding.by_layer:
        if degrees.weight_replicas == 1 and not on_host:
            return whole
        # the embedding may be larger than a bucket
        largest = (
            FP32 * shape.vocabulary_on_rank(degrees.tensor_parallel) * shape.hidden
            if config.training.method == "full"
            else 0
        )
        bucket = min(whole, max(BUCKET_BYTES, largest))
        # whole ones are there until the last micro batch of a step; on one shard rank, what was sent is what is kept
        if accumulated or (ranks == 1 and not on_host):
            return whole + bucket
        return 2 * bucket + (0.0 if on_host else whole / ranks)
    ends = 0 if config.training.method == "lora" else stage.end_parameters
    layers = stage.trainable - ends
    in_bucket = _layers_in_bucket(config, stage) / stage.layers * layers
    sharded = 0.0 if sharding.offload == "parameters" else whole / ranks
    sent = element_bytes(config) + FP32
    kept = sharded if accumulated else 0.0  # during a micro batch
    # what was received of a bucket is released after the next one was
    received = 2 * _weights_in_bucket(config, stage) * element_bytes(config) if sharding.mode == "zero2" else 0.0
    # the backward pass begins with the last layers, and ends with embedding and output matrix, when zero2 has released
    # the layers
    begins = kept + in_bucket * sent
    released = layers * element_bytes(config) if sharding.mode == "zero2" else 0.0
    return max(kept + received, begins, sharded + ends * sent - released)


def _optimizer(config: RunConfig, stage: PipelineStageSize, sharding: Sharding) -> float:
    """Moments, and fp32 weights where those that compute are bf16 (with FSDP2 they are the sharded weights)."""
    if sharding.offload != "none":
        return 0.0
    masters = config.training.method == "full" and element_bytes(config) < FP32 and not sharding.by_layer
    each = _MOMENTS[config.training.optimizer_state] + (FP32 if masters else 0)
    return stage.trainable * each / sharding.shard_ranks
