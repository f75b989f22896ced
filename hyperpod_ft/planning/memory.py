"""Accelerator memory of a training step on the fullest rank: an estimate, made before anything runs.

Weights, gradients and optimizer state are counted as in ZeRO (Rajbhandari et al., arXiv:1910.02054, section 3.1):
bytes per parameter, divided by the data-parallel degree if sharded by ZeRO-1 or FSDP. Activations are counted as by
Korthikanti et al. (arXiv:2205.05198): the tensors that a layer's forward pass keeps for its backward pass. Their GPT
layer keeps s b h (34 + 5 a s / h) bytes (equation 1); tensor parallelism divides those inside attention and MLP by t
(equation 2), sequence parallelism the rest too (equation 4), and full recomputation keeps only a layer's input,
2 s b h. `_layer` is equation 1 for a layer of the Llama family; docs/memory.md shows it. What differs
between engines is in torch/memory.py and neuron/memory.py, except for the rows of a micro batch (`tokens`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.degrees import Degrees, copies_over_tensor
from hyperpod_ft.planning.lora_targets import target_names
from hyperpod_ft.planning.model_shape import Linear, ModelShape

GIB = 2**30
# Share of a rank's memory for the runtime, compiled programs, collectives' buffers and short-lived tensors of the
# backward pass. An assumption: it was not measured for this kit.
RESERVED = 0.1
FP32 = 4  # bytes of an element
# Smaller tensors stay on the device with `activation_offload`: their copies would cost more time than they free memory.
OFFLOADED_BYTES = 2**20


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    weights: float
    gradients: float
    optimizer: float  # AdamW's moments and fp32 master weights
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits

    def __str__(self) -> str:
        parts = (f"{name} {value / GIB:.1f}" for name, value in vars(self).items())
        return f"{self.total / GIB:.1f} GiB per rank ({', '.join(parts)})"


@dataclass(frozen=True)
class PipelineStageSize:
    """What a rank of a pipeline has of the model, after tensor parallelism."""

    layers: int
    layer_parameters: int
    end_parameters: int  # embedding, last norm and output matrix, if on this stage
    quantized: int  # of the layers' parameters, those in 4 bits
    trainable: int
    in_flight: float  # micro batches whose activations are in memory at the same time
    last: bool

    @property
    def parameters(self) -> int:
        """Parameters of the base model, without adapters."""
        return self.layers * self.layer_parameters + self.end_parameters


@dataclass(frozen=True)
class KeptTensors:
    """What a forward pass keeps for the backward pass, where engines differ."""

    outside_share: float  # of the tensors between attention and MLP that a rank has: 1 without sequence parallelism
    input_share: float  # of the inputs of attention, MLP and loss that a rank has
    attention: float  # bytes per token of attention on all tensor-parallel ranks together
    activated: bool = True  # the MLP keeps its activated gate
    normalized: bool = True  # norms keep their normalized input, as they do when their weight is trained
    exchanged: float = 0.0  # likewise, what ranks that share a row exchange for attention
    norm_input: int = FP32  # bytes of an element of a norm's input
    adapter_input: int = 0  # bytes of an element of an adapter's own copy of its input; 0: it has none


def available(config: RunConfig) -> float:
    """Accelerator memory of a rank for a training step, in bytes; 0 on instances without accelerators."""
    return config.instance.rank_gib * GIB * (1 - RESERVED)


def pipeline_stage_sizes(
    config: RunConfig,
    degrees: Degrees,
    shape: ModelShape,
    layers_of: Sequence[int],
    in_flight: Sequence[float],
) -> Iterator[PipelineStageSize]:
    """The size of each rank's stage, which has `layers_of` layers and `in_flight` micro batches in memory.

    Tensor parallelism divides the vocabulary too.
    """
    tensor, stages = degrees.tensor_parallel, degrees.pipeline_parallel
    vocabulary = shape.vocabulary_on_rank(tensor)
    matrix = vocabulary * shape.hidden
    linears = sum(linear.inputs * linear.outputs * _copies(linear, shape, tensor) for linear in shape.linears)
    layer = (linears + shape.column_biases) // tensor + shape.layer_vectors
    for stage in range(stages):
        first, last = stage == 0, stage == stages - 1
        layers = layers_of[stage]
        ends = matrix * (first + (last and not (shape.tied and first)))
        ends += first * shape.positions * shape.hidden
        ends += last * (shape.end_vectors + ("head" in shape.biases) * vocabulary)
        adapters = layers * _layer_adapters(config, shape, tensor)
        adapters += _end_adapters(config, shape, vocabulary, first, last)
        yield PipelineStageSize(
            layers=layers,
            layer_parameters=layer,
            end_parameters=ends,
            quantized=layers * _layer_quantized(config, shape),
            trainable=adapters if config.training.method == "lora" else layers * layer + ends,
            in_flight=in_flight[stage],
            last=last,
        )


def _layer_quantized(config: RunConfig, shape: ModelShape) -> int:
    """Parameters of a layer that `lora.quantization` keeps in 4 bits, which is refused with tensor parallelism."""
    if config.lora.quantization == "none":
        return 0
    return sum(linear.inputs * linear.outputs for linear in _adapted(config, shape))


def _adapted(config: RunConfig, shape: ModelShape) -> list[Linear]:
    names = target_names(config.lora, shape.model_type)
    return [linear for linear in shape.linears if linear.name in names]


def _copies(linear: Linear, shape: ModelShape, tensor: int) -> int:
    """How often a tensor-parallel group has the linear's outputs: with more ranks than key heads, more than once."""
    return copies_over_tensor(shape.kv_heads, tensor) if linear.of_keys else 1


def _layer_adapters(config: RunConfig, shape: ModelShape, tensor: int) -> int:
    """LoRA parameters of a layer on a rank: one matrix of each pair is divided, the other whole."""
    total = 0
    for linear in _adapted(config, shape):
        inputs, outputs = linear.inputs, linear.outputs
        if linear.by_outputs:
            outputs = outputs * _copies(linear, shape, tensor) // tensor
        else:
            inputs //= tensor
        # DoRA has a magnitude for each output
        total += config.lora.r * (inputs + outputs) + config.lora.dora * outputs
    return total


def _end_adapters(config: RunConfig, shape: ModelShape, vocabulary: int, first: bool, last: bool) -> int:
    """An embedding's factors are whole on each rank; of the head's, one has the rank's `vocabulary` entries."""
    targets, lora = target_names(config.lora, shape.model_type), config.lora
    embedding = lora.r * (shape.vocabulary + shape.hidden) + lora.dora * shape.hidden
    head = lora.r * (vocabulary + shape.hidden) + lora.dora * vocabulary
    is_embedding, is_head = (path.rpartition(".")[2] in targets for path in (shape.family.embedding, shape.family.head))
    return (is_embedding and first) * embedding + (is_head and last) * head


def element_bytes(config: RunConfig) -> int:
    """Bytes of an element of the activations."""
    return 2 if config.training.precision == "bf16" else FP32


def in_fp32_too(config: RunConfig) -> int:
    """Bytes of an element of what is computed in fp32 and used in the dtype of the activations."""
    element = element_bytes(config)
    return FP32 + (element if element < FP32 else 0)


def tokens(config: RunConfig, degrees: Degrees) -> int:
    """Tokens of a micro batch on a rank; in a pipeline of engine neuron, each row is a micro batch."""
    one_row = config.engine == "neuron" and degrees.pipeline_parallel > 1
    rows = 1 if one_row else config.training.micro_batch_size
    return rows * config.dataset.max_length // degrees.context_parallel


def last_norm(config: RunConfig, shape: ModelShape, kept: KeptTensors) -> float:
    """Bytes per token that the last norm keeps."""
    return (shape.hidden * _norm(config, shape, kept) + shape.hidden * element_bytes(config)) * kept.input_share


def _norm(config: RunConfig, shape: ModelShape, kept: KeptTensors) -> float:
    """Bytes that a norm keeps of each element of its input: LayerNorm that input, RMSNorm the normalized tensor too."""
    if "norms" in shape.biases:
        return element_bytes(config)
    if shape.family.wide_norms:
        return 2 * FP32 if config.training.method == "full" else FP32
    return kept.norm_input + kept.normalized * element_bytes(config)


def activations(
    config: RunConfig, degrees: Degrees, shape: ModelShape, stage: PipelineStageSize, kept: KeptTensors, logits: float
) -> float:
    """Bytes of the activations kept for the backward pass. `logits`: bytes that the loss adds to them."""
    count, checkpointing = tokens(config, degrees), config.training.activation_checkpointing
    whole = count * _layer(config, degrees, shape, kept)
    given = count * shape.hidden * element_bytes(config) * kept.outside_share
    products = count * _products(config, degrees, shape, kept)
    layers = stage.in_flight * kept_by_layers(config, stage.layers, whole, given, products)
    if checkpointing == "none":
        return layers
    # one layer is recomputed, after the loss has freed its memory
    return layers + max(0.0, whole - (products if checkpointing == "selective" else 0.0) - logits)


def kept_by_layers(config: RunConfig, layers: int, whole: float, given: float, products: float) -> float:
    """Bytes on the device that alike layers keep for the backward pass.

    A layer keeps `whole` bytes, or, if it is recomputed, only `given`, its input, and with `selective` its `products`
    too, of matrices and attention.
    """
    training = config.training
    if training.activation_checkpointing == "none":
        return _resident(config, layers, whole)
    recomputed = -(-layers // training.activation_checkpointing_every)
    of_products = recomputed * products if training.activation_checkpointing == "selective" else 0.0
    return _resident(config, recomputed, given) + of_products + _resident(config, layers - recomputed, whole)


def _resident(config: RunConfig, layers: int, each: float) -> float:
    """Bytes on the device of what layers keep: with offload, of a layer and of one whose copy is on its way."""
    moves = config.training.activation_offload and each >= OFFLOADED_BYTES
    return (min(layers, 2) if moves else layers) * each


def _products(config: RunConfig, degrees: Degrees, shape: ModelShape, kept: KeptTensors) -> float:
    """Bytes per token of a layer's matrix products, of attention, and of what ranks exchange for it."""
    inside = 2 * shape.query_width + 2 * shape.key_width + (2 if shape.gated else 1) * shape.intermediate
    return element_bytes(config) * (2 * shape.hidden + inside / degrees.tensor_parallel) + (
        kept.exchanged / degrees.tensor_parallel
    )


def _layer(config: RunConfig, degrees: Degrees, shape: ModelShape, kept: KeptTensors) -> float:
    """Bytes per token that a layer's forward pass keeps.

    Norms keep their input (`_norm`), attention and MLP theirs. A gated MLP keeps gate, its activation
    (`kept.activated`), up, and their product; another what it activates, and the result.
    """
    element = element_bytes(config)
    outside = shape.family.norms * shape.hidden * _norm(config, shape, kept)
    inputs = (1 if shape.family.shared_input else 2) * shape.hidden * element
    units = 3 + kept.activated if shape.gated else 2
    inside = kept.attention + element * units * shape.intermediate
    if shape.head_norms:
        inside += _norm(config, shape, kept) * (shape.query_width + shape.key_width)
    if config.training.method == "lora":
        in_outside, in_inside = _adapter_activations(config, shape, kept)
        inputs, inside = inputs + in_outside, inside + in_inside
    return outside * kept.outside_share + inputs * kept.input_share + inside / degrees.tensor_parallel


def _adapter_activations(config: RunConfig, shape: ModelShape, kept: KeptTensors) -> tuple[int, int]:
    """Bytes per token of the adapters' inputs, and DoRA's outputs, outside and inside attention and MLP.

    Dropout keeps its output and a mask. Tensors as narrow as an adapter's rank are not counted.
    """
    each = kept.adapter_input
    if config.lora.dropout:
        each += 1 + (each or element_bytes(config))
    columns = [linear for linear in _adapted(config, shape) if linear.by_outputs]
    rows = [linear for linear in _adapted(config, shape) if not linear.by_outputs]
    # DoRA keeps each output before it is rescaled
    element = config.lora.dora * element_bytes(config)
    return (
        each * sum(linear.inputs for linear in columns) + element * sum(linear.outputs for linear in rows),
        each * sum(linear.inputs for linear in rows) + element * sum(linear.outputs for linear in columns),
    )
