"""Accelerator memory of a training step on the fullest rank: an estimate, made before anything runs.

Weights, gradients and optimizer state are counted as in ZeRO (Rajbhandari et al., arXiv:1910.02054, section 3.1):
bytes per parameter, divided by the data-parallel degree if sharded by ZeRO-1 or FSDP. Activations are counted as by
Korthikanti et al. (arXiv:2205.05198): the tensors that a layer's forward pass keeps for its backward pass. Their GPT
layer keeps s b h (34 + 5 a s / h) bytes (equation 1); tensor parallelism divides those inside attention and MLP by t
(equation 2), sequence parallelism the rest too (equation 4), and full recomputation keeps only a layer's input,
2 s b h. `StepMemory._layer` is equation 1 for a layer of the Llama family; benchmarks/performance.md has its figures.
What differs between engines is in torch/memory.py and neuron/memory.py.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.layout import Degrees
from hyperpod_ft.planning.lora import adapted_linears
from hyperpod_ft.planning.model_shape import ModelShape
from hyperpod_ft.planning.stage_sizes import PipelineStageSize

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
    return config.instance.rank_gib * GIB * (1 - RESERVED - config.vllm_share)


def element_bytes(config: RunConfig) -> int:
    """Bytes of an element of the activations."""
    return 2 if config.training.precision == "bf16" else FP32


@dataclass(frozen=True)
class StepMemory(ABC):
    """Counts the memory of a run's training step. Engines add what differs between them."""

    config: RunConfig
    degrees: Degrees
    shape: ModelShape

    @property
    @abstractmethod
    def kept(self) -> KeptTensors:
        """What a forward pass keeps."""

    @property
    @abstractmethod
    def stages(self) -> tuple[PipelineStageSize, ...]:
        """What each rank of the pipeline has of the model."""

    @cached_property
    def element(self) -> int:
        """Bytes of an element of the activations."""
        return element_bytes(self.config)

    @property
    def in_fp32_too(self) -> int:
        """Bytes of an element of what is computed in fp32 and used in the dtype of the activations."""
        return FP32 + (self.element if self.element < FP32 else 0)

    @property
    def tokens(self) -> int:
        """Tokens of a micro batch on a rank."""
        rows = self.config.training.micro_batch_size
        return rows * self.config.dataset.max_length // self.degrees.context_parallel

    @property
    def last_norm(self) -> float:
        """Bytes per token that the last norm keeps."""
        return (self.shape.hidden * self._norm + self.shape.hidden * self.element) * self.kept.input_share

    def activations(self, stage: PipelineStageSize, logits: float) -> float:
        """Bytes of the activations kept for the backward pass. `logits`: bytes that the loss adds to them."""
        count, checkpointing = self.tokens, self.config.training.activation_checkpointing
        whole = count * self._layer
        given = count * self.shape.hidden * self.element * self.kept.outside_share
        products = count * self._products
        layers = stage.in_flight * self.kept_by_layers(stage.layers, whole, given, products)
        if checkpointing == "none":
            return layers
        # one layer is recomputed, after the loss has freed its memory
        return layers + max(0.0, whole - (products if checkpointing == "selective" else 0.0) - logits)

    def kept_by_layers(self, layers: int, whole: float, given: float, products: float) -> float:
        """Bytes on the device that alike layers keep for the backward pass.

        A layer keeps `whole` bytes, or, if it is recomputed, only `given`, its input, and with `selective` its
        `products` too, of matrices and attention.
        """
        training = self.config.training
        if training.activation_checkpointing == "none":
            return self._resident(layers, whole)
        recomputed = -(-layers // training.activation_checkpointing_every)
        of_products = recomputed * products if training.activation_checkpointing == "selective" else 0.0
        return self._resident(recomputed, given) + of_products + self._resident(layers - recomputed, whole)

    def _resident(self, layers: int, each: float) -> float:
        """Bytes on the device of what layers keep: with offload, of a layer and of one whose copy is on its way."""
        moves = self.config.training.activation_offload and each >= OFFLOADED_BYTES
        return (min(layers, 2) if moves else layers) * each

    @property
    def _norm(self) -> float:
        """Bytes that a norm keeps of each element of its input.

        LayerNorm keeps that input, RMSNorm the normalized tensor too.
        """
        if "norms" in self.shape.biases:
            return self.element
        if self.shape.family.wide_norms:
            return 2 * FP32 if self.config.training.method == "full" else FP32
        return self.kept.norm_input + self.kept.normalized * self.element

    @property
    def _products(self) -> float:
        """Bytes per token of a layer's matrix products, of attention, and of what ranks exchange for it."""
        shape, tensor = self.shape, self.degrees.tensor_parallel
        inside = 2 * shape.query_width + 2 * shape.key_width + (2 if shape.gated else 1) * shape.intermediate
        return self.element * (2 * shape.hidden + inside / tensor) + self.kept.exchanged / tensor

    @property
    def _layer(self) -> float:
        """Bytes per token that a layer's forward pass keeps.

        Norms keep their input (`_norm`), attention and MLP theirs. A gated MLP keeps gate, its activation
        (`kept.activated`), up, and their product; another what it activates, and the result.
        """
        shape, kept = self.shape, self.kept
        outside = shape.family.norms * shape.hidden * self._norm
        inputs = (1 if shape.family.shared_input else 2) * shape.hidden * self.element
        units = 3 + kept.activated if shape.gated else 2
        inside = kept.attention + self.element * units * shape.intermediate
        if shape.head_norms:
            inside += self._norm * (shape.query_width + shape.key_width)
        if self.config.training.method == "lora":
            in_outside, in_inside = self._adapter_activations
            inputs, inside = inputs + in_outside, inside + in_inside
        return outside * kept.outside_share + inputs * kept.input_share + inside / self.degrees.tensor_parallel

    @property
    def _adapter_activations(self) -> tuple[int, int]:
        """Bytes per token of the adapters' inputs, and DoRA's outputs, outside and inside attention and MLP.

        Dropout keeps its output and a mask. Tensors as narrow as an adapter's rank are not counted.
        """
        lora, each = self.config.lora, self.kept.adapter_input
        if lora.dropout:
            each += 1 + (each or self.element)
        adapted = adapted_linears(lora, self.shape)
        columns = [linear for linear in adapted if linear.by_outputs]
        rows = [linear for linear in adapted if not linear.by_outputs]
        # DoRA keeps each output before it is rescaled
        element = lora.dora * self.element
        return (
            each * sum(linear.inputs for linear in columns) + element * sum(linear.outputs for linear in rows),
            each * sum(linear.inputs for linear in rows) + element * sum(linear.outputs for linear in columns),
        )
