"""What each rank of a pipeline has of a model: layers, parameters, and those that are trained."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sections.training import Lora
from hyperpod_ft.planning.layout import Degrees, copies_over_tensor
from hyperpod_ft.planning.lora import adapted_linears, target_names, whole_modules
from hyperpod_ft.planning.model_shape import Linear, ModelShape


@dataclass(frozen=True)
class PipelineStageSize:
    """What a rank of a pipeline has of the model, after tensor parallelism."""

    layers: int
    layer_parameters: int
    end_parameters: int  # embedding, last norm and output matrix, if on this stage
    quantized: int  # of the layers' parameters, those in 4 bits
    trainable: int
    whole_ends: int  # of those, the ends' own: with LoRA, what `lora.modules_to_save` names
    in_flight: float  # micro batches whose activations are in memory at the same time
    last: bool
    experts: int = 0  # of the layers' parameters, those of this rank's experts
    trained_experts: int = 0  # of what is trained, theirs, or their adapters

    @property
    def parameters(self) -> int:
        """Parameters of the base model, without adapters."""
        return self.layers * self.layer_parameters + self.end_parameters


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
    layer_adapters, quantized = _layer_adapters(config.lora, shape, tensor), _layer_quantized(config.lora, shape)
    for stage in range(stages):
        first, last = stage == 0, stage == stages - 1
        layers = layers_of[stage]
        ends = matrix * (first + (last and not (shape.tied and first)))
        ends += first * shape.positions * shape.hidden
        ends += last * (shape.end_vectors + ("head" in shape.biases) * vocabulary)
        lora = config.training.method == "lora"
        whole = matrix * _whole_matrices(config.lora, shape, first, last) if lora else ends
        adapters = layers * layer_adapters + _end_adapters(config.lora, shape, vocabulary, first, last)
        yield PipelineStageSize(
            layers=layers,
            layer_parameters=layer,
            end_parameters=ends,
            quantized=layers * quantized,
            trainable=(adapters if lora else layers * layer) + whole,
            whole_ends=whole,
            in_flight=in_flight[stage],
            last=last,
        )


def _copies(linear: Linear, shape: ModelShape, tensor: int) -> int:
    """How often a tensor-parallel group has the linear's outputs: with more ranks than key heads, more than once."""
    return copies_over_tensor(shape.kv_heads, tensor) if linear.of_keys else 1


def _layer_quantized(lora: Lora, shape: ModelShape) -> int:
    """Parameters of a layer that `lora.quantization` keeps in 4 bits, which is refused with tensor parallelism."""
    if lora.quantization == "none":
        return 0
    return sum(linear.inputs * linear.outputs for linear in adapted_linears(lora, shape))


def _layer_adapters(lora: Lora, shape: ModelShape, tensor: int) -> int:
    """LoRA parameters of a layer on a rank: one matrix of each pair is divided, the other whole."""
    total = 0
    for linear in adapted_linears(lora, shape):
        inputs, outputs = linear.inputs, linear.outputs
        if linear.by_outputs:
            outputs = outputs * _copies(linear, shape, tensor) // tensor
        else:
            inputs //= tensor
        # DoRA has a magnitude for each output
        total += lora.r * (inputs + outputs) + lora.dora * outputs
    return total


def _end_adapters(lora: Lora, shape: ModelShape, vocabulary: int, first: bool, last: bool) -> int:
    """LoRA parameters of the embedding and the head, if they are on this stage.

    An embedding's factors are whole on each rank; of the head's, one has the rank's `vocabulary` entries.
    """
    targets = target_names(lora, shape.model_type)
    embedding = lora.r * (shape.vocabulary + shape.hidden) + lora.dora * shape.hidden
    head = lora.r * (vocabulary + shape.hidden) + lora.dora * vocabulary
    ends = (shape.family.embedding, shape.family.head)
    is_embedding, is_head = (path.rpartition(".")[2] in targets for path in ends)
    return (is_embedding and first) * embedding + (is_head and last) * head


def _whole_matrices(lora: Lora, shape: ModelShape, first: bool, last: bool) -> int:
    """How many of embedding and head are trained whole beside adapters, of those that are on this stage."""
    ends = (shape.family.embedding, shape.family.head)
    whole = whole_modules(lora.modules_to_save, ends, tied=False)
    return sum(end for path, end in zip(ends, (first, last), strict=True) if path in whole)
