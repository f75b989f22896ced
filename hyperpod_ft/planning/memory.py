"""Accelerator memory of a training step on the fullest rank: an estimate, made before anything runs.

Weights, gradients and optimizer state are counted as in ZeRO (Rajbhandari et al., arXiv:1910.02054, section 3.1):
bytes per parameter, divided by the data-parallel degree if sharded by ZeRO-1 or FSDP. Activations are counted as by
Korthikanti et al. (arXiv:2205.05198): the tensors that a layer's forward pass keeps for its backward pass. Their GPT
layer keeps s b h (34 + 5 a s / h) bytes (equation 1); tensor parallelism divides those inside attention and MLP by t
(equation 2), sequence parallelism the rest too (equation 4), and full recomputation keeps only a layer's input,
2 s b h. `_layer_activations` is equation 1 for a layer of the Llama family; docs/parallelism.md shows it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from hyperpod_ft.config.instances import CATALOGUE
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.model_shape import COLUMN_PARALLEL, ModelShape
from hyperpod_ft.planning.parallelism import Degrees, kv_size_multiplier

GIB = 2**30
# Share of a rank's memory for the runtime, compiled programs, collectives' buffers and short-lived tensors of the
# backward pass. An assumption: it was not measured for this kit.
RESERVED = 0.1
_FP32 = 4
_QUANTIZED = 4.5 / 8  # NF4: 4 bits, and an fp32 scale for 64 parameters


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
        return f"{self.total / GIB:.1f} GiB a rank ({', '.join(parts)})"


@dataclass(frozen=True)
class Part:
    """The part of the model on a rank of one pipeline stage, after tensor parallelism."""

    layers: int
    layer_parameters: int
    end_parameters: int  # embedding, last norm and output matrix, if on this stage
    quantized: int  # of the layers' parameters, those in 4 bits
    trainable: int
    in_flight: int  # micro batches whose activations are in memory at the same time
    last: bool

    @property
    def parameters(self) -> int:
        """Parameters of the base model, without adapters."""
        return self.layers * self.layer_parameters + self.end_parameters


def available(config: RunConfig) -> float:
    """Accelerator memory of a rank for a training step, in bytes; 0 on instances without accelerators."""
    return CATALOGUE[config.cluster.instance_type].rank_gib * GIB * (1 - RESERVED)


def estimate(config: RunConfig, degrees: Degrees, shape: ModelShape) -> Memory:
    """Memory of the fullest rank. `shape` has passed `parallelism.check_model`."""
    of_engine = {"torch": _torch, "neuron": _neuron}[config.engine]
    estimates = (of_engine(config, degrees, shape, part) for part in parts(config, degrees, shape))
    return max(estimates, key=lambda memory: memory.total)


def parts(config: RunConfig, degrees: Degrees, shape: ModelShape) -> Iterator[Part]:
    """One for each pipeline stage. As in neuronx-distributed, the last stages have the layers left over."""
    tensor, stages = degrees.tensor_parallel, degrees.pipeline_parallel
    # engine torch does not divide embedding and output matrix
    matrix = shape.vocabulary * shape.hidden // (tensor if config.engine == "neuron" else 1)
    copies = kv_size_multiplier(shape.kv_heads, tensor)
    linears = {
        name: inputs * outputs * (copies if name in ("k_proj", "v_proj") else 1)
        for name, (inputs, outputs) in shape.linears.items()
    }
    layer = sum(linears.values()) // tensor + shape.layer_vectors
    # in a pipeline, optimum-neuron makes each row a micro batch
    micro_batches = config.training.micro_batch_size * config.training.gradient_accumulation_steps
    for stage in range(stages):
        first, last = stage == 0, stage == stages - 1
        layers = shape.layers // stages + (stage >= stages - shape.layers % stages)
        ends = matrix * (first + (last and not (shape.tied and first))) + shape.hidden * last
        adapters = layers * _layer_adapters(config, shape, tensor) + _end_adapters(config, shape, first, last)
        yield Part(
            layers=layers,
            layer_parameters=layer,
            end_parameters=ends,
            quantized=layers * _layer_quantized(config, shape),
            trainable=adapters if config.training.method == "lora" else layers * layer + ends,
            # 1F1B: in stage k of p, p - k micro batches are in flight (section 4.2.3 of arXiv:2205.05198)
            in_flight=min(stages - stage, micro_batches),
            last=last,
        )


def _targets(config: RunConfig) -> set[str]:
    return {target.rpartition(".")[2] for target in config.lora.target_modules}


def _layer_quantized(config: RunConfig, shape: ModelShape) -> int:
    """Parameters of a layer that `lora.quantization` keeps in 4 bits, which is refused with tensor parallelism."""
    if config.lora.quantization == "none":
        return 0
    return sum(inputs * outputs for name, (inputs, outputs) in shape.linears.items() if name in _targets(config))


def _layer_adapters(config: RunConfig, shape: ModelShape, tensor: int) -> int:
    """LoRA parameters of a layer on a rank: one matrix of each pair is divided, the other whole."""
    total = 0
    for name, (inputs, outputs) in shape.linears.items():
        if name in _targets(config):
            divided = (inputs, outputs // tensor) if name in COLUMN_PARALLEL else (inputs // tensor, outputs)
            # DoRA has a magnitude for each output
            total += config.lora.r * sum(divided) + config.lora.dora * divided[1]
    return total


def _end_adapters(config: RunConfig, shape: ModelShape, first: bool, last: bool) -> int:
    targets = _targets(config)
    matrices = ("embed_tokens" in targets and first) + ("lm_head" in targets and last)
    magnitudes = ("embed_tokens" in targets and first) * shape.hidden + (
        "lm_head" in targets and last
    ) * shape.vocabulary
    return config.lora.r * matrices * (shape.vocabulary + shape.hidden) + config.lora.dora * magnitudes


def _neuron(config: RunConfig, degrees: Degrees, shape: ModelShape, part: Part) -> Memory:
    """optimum-neuron: bf16 weights; with ZeRO-1 the optimizer has its own copy, and shards all of its state."""
    lora, bf16 = config.training.method == "lora", config.training.precision == "bf16"
    computed = 2 if bf16 else _FP32
    trained = _FP32 if lora else computed  # PEFT keeps adapters in fp32
    frozen = part.parameters * computed if lora else 0
    # only with bf16: with ZeRO-1, optimum-neuron would give an fp32 model a bf16 optimizer
    if config.neuron.zero_1 and bf16:
        kept = _FP32 if config.neuron.master_weights else 2
        accumulated = _FP32 if config.neuron.master_weights else trained
        gradients = part.trainable * (accumulated + kept / degrees.data_parallel)
        optimizer = part.trainable * 3 * kept / degrees.data_parallel
    else:
        gradients = float(part.trainable * trained)
        optimizer = float(part.trainable * 2 * trained)
    activations, logits = _activations(config, degrees, shape, part)
    return Memory(frozen + part.trainable * trained, gradients, optimizer, activations, logits)


def _torch(config: RunConfig, degrees: Degrees, shape: ModelShape, part: Part) -> Memory:
    """FSDP2: everything is sharded over data parallelism, and gathered to compute."""
    training, data = config.training, degrees.data_parallel
    lora = training.method == "lora"
    computed = 2 if training.precision == "bf16" else _FP32
    adapters = part.trainable if lora else 0
    shared = part.parameters - part.quantized  # between data-parallel ranks
    at_rest = shared * (computed if lora else _FP32) + adapters * _FP32
    gathered = float(shared + adapters)
    if training.gradient_checkpointing:
        # the current layer and the next, which is prefetched; embedding and output matrix stay gathered
        gathered = part.end_parameters + min(2, part.layers) * (gathered - part.end_parameters) / part.layers
    # fp32 gradients of earlier micro batches, not yet reduced
    waiting = _FP32 if training.gradient_accumulation_steps > 1 else 0
    activations, logits = _activations(config, degrees, shape, part)
    return Memory(
        weights=at_rest / data + gathered * computed + part.quantized * _QUANTIZED,
        gradients=part.trainable * (_FP32 / data + waiting),
        optimizer=part.trainable * 2 * _FP32 / data,
        activations=activations,
        logits=logits,
    )


def _activations(config: RunConfig, degrees: Degrees, shape: ModelShape, part: Part) -> tuple[float, float]:
    """Bytes of the activations kept for the backward pass, and of the tensors that the loss adds to them."""
    training = config.training
    rows = training.micro_batch_size if degrees.pipeline_parallel == 1 else 1
    tokens = rows * config.dataset.max_length
    width = 2 if training.precision == "bf16" else _FP32
    outside = _outside_share(config, degrees)
    layer = tokens * _layer_activations(config, degrees, shape)
    logits = tokens * _loss_bytes(config, degrees, shape) * part.last
    if not training.gradient_checkpointing:
        return part.in_flight * part.layers * layer, logits
    kept = part.in_flight * part.layers * tokens * shape.hidden * width * outside
    # one layer is recomputed, after the loss has freed its memory
    return kept + max(0.0, layer - logits), logits


def _outside_share(config: RunConfig, degrees: Degrees) -> float:
    """Share of the activations outside attention and MLP on a rank: 1 without sequence parallelism."""
    divided = config.engine == "neuron" and config.neuron.sequence_parallel
    return 1 / degrees.tensor_parallel if divided else 1.0


def _layer_activations(config: RunConfig, degrees: Degrees, shape: ModelShape) -> float:
    """Bytes per token that a layer's forward pass keeps.

    Two norms each keep their input in fp32, the normalized tensor, and the linears' input. Attention keeps query, key
    and value at the width of the queries, and its output twice (as computed, and as o_proj's input); eager attention
    keeps the softmax in place of one of them, in fp32 and in the model's dtype. The MLP keeps gate, its activation, up,
    and their product.
    """
    width = 2 if config.training.precision == "bf16" else _FP32
    outside = 2 * shape.hidden * (_FP32 + 2 * width)
    inside = width * (4 * shape.queries + 4 * shape.intermediate)
    if config.flash_attention if config.engine == "neuron" else config.model.attention == "sdpa":
        inside += width * shape.queries
    else:
        inside += shape.heads * config.dataset.max_length * (_FP32 + (width if width < _FP32 else 0))
    if shape.head_norms:
        inside += (_FP32 + width) * (shape.queries + shape.keys)
    if config.training.method == "lora":
        in_outside, in_inside = _adapter_activations(config, shape)
        outside, inside = outside + in_outside, inside + in_inside
    return outside * _outside_share(config, degrees) + inside / degrees.tensor_parallel


def _adapter_activations(config: RunConfig, shape: ModelShape) -> tuple[int, int]:
    """Bytes per token of the adapters' inputs, and DoRA's outputs, outside and inside attention and MLP.

    On engine neuron adapters are fp32, so a bf16 input is kept in fp32 as well; dropout keeps its output and a mask.
    Tensors as narrow as an adapter's rank are not counted.
    """
    each = _FP32 if config.engine == "neuron" and config.training.precision == "bf16" else 0
    if config.lora.dropout:
        each += 1 + (each or (2 if config.training.precision == "bf16" else _FP32))
    targets = _targets(config)
    inputs = {name: sides[0] for name, sides in shape.linears.items() if name in targets}
    outside = sum(wide for name, wide in inputs.items() if name in COLUMN_PARALLEL)
    # DoRA keeps each output before it is rescaled
    width = config.lora.dora * (2 if config.training.precision == "bf16" else _FP32)
    outputs = {name: sides[1] for name, sides in shape.linears.items() if name in targets}
    divided = sum(wide for name, wide in outputs.items() if name in COLUMN_PARALLEL)
    return (
        each * outside + width * (sum(outputs.values()) - divided),
        each * (sum(inputs.values()) - outside) + width * divided,
    )


def _loss_bytes(config: RunConfig, degrees: Degrees, shape: ModelShape) -> float:
    """Bytes per token of the last norm, the logits and the cross entropy.

    Engine neuron divides the vocabulary: logits, their fp32 copy, and the softmax. Engine torch does not: at the peak,
    in the backward pass, it has log-probabilities and two gradients, all fp32.
    """
    width = 2 if config.training.precision == "bf16" else _FP32
    norm = shape.hidden * (_FP32 + 2 * width) * _outside_share(config, degrees)
    if config.engine == "neuron":
        return norm + shape.vocabulary / degrees.tensor_parallel * (width + 2 * _FP32)
    return norm + shape.vocabulary * 3 * _FP32
