"""Memory of a training step of engine neuron: optimum-neuron on neuronx-distributed."""

from collections.abc import Iterator

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.degrees import Degrees
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


def stage_sizes(config: RunConfig, degrees: Degrees, shape: ModelShape) -> Iterator[PipelineStageSize]:
    """The stages of a pipeline: the last ones have the layers left over, and the schedule is 1F1B."""
    stages = degrees.pipeline_parallel
    # in a pipeline, optimum-neuron makes each row a micro batch
    micro_batches = config.training.micro_batch_size * config.training.gradient_accumulation_steps
    return pipeline_stage_sizes(
        config,
        degrees,
        shape,
        layers_of=[shape.layers // stages + (stage >= stages - shape.layers % stages) for stage in range(stages)],
        # in stage k of p, p - k micro batches are in flight (section 4.2.3 of arXiv:2205.05198)
        in_flight=[min(stages - stage, micro_batches) for stage in range(stages)],
    )


def on_rank(config: RunConfig, degrees: Degrees, shape: ModelShape, stage: PipelineStageSize) -> Memory:
    """bf16 weights; with ZeRO-1 the optimizer has its own copy, and shards all of its state.

    The vocabulary is divided: the loss keeps logits, their fp32 copy, and the softmax.
    """
    lora, bf16 = config.training.method == "lora", config.training.precision == "bf16"
    trained = FP32 if lora else element_bytes(config)  # PEFT keeps adapters in fp32
    frozen = stage.parameters * element_bytes(config) if lora else 0
    # only with bf16: with ZeRO-1, optimum-neuron would give an fp32 model a bf16 optimizer
    if config.neuron.zero_1 and bf16:
        own = FP32 if config.neuron.master_weights else 2
        accumulated = FP32 if config.neuron.master_weights else trained
        gradients = stage.trainable * (accumulated + own / degrees.data_parallel)
        optimizer = stage.trainable * 3 * own / degrees.data_parallel
    else:
        gradients = float(stage.trainable * trained)
        optimizer = float(stage.trainable * 2 * trained)
    share_of_tokens = 1 / degrees.tensor_parallel if config.neuron.sequence_parallel else 1.0
    kept = KeptTensors(
        outside_share=share_of_tokens,
        input_share=share_of_tokens,
        attention=_attention(config, shape),
        adapter_input=FP32 if bf16 else 0,  # adapters are fp32
    )
    loss = shape.vocabulary / degrees.tensor_parallel * (element_bytes(config) + 2 * FP32)
    logits = stage.last * tokens(config, degrees) * (last_norm(config, shape, kept) + loss)
    return Memory(
        weights=frozen + stage.trainable * trained,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations(config, degrees, shape, stage, kept, logits),
        logits=logits,
    )


def _attention(config: RunConfig, shape: ModelShape) -> float:
    """Bytes per token: query, key and value at the width of the queries, and the output as o_proj's input.

    A flash attention kernel keeps its output too; otherwise the softmax is kept, in fp32 and in the model's dtype.
    """
    element = element_bytes(config)
    if config.flash_attention:
        return element * 5 * shape.query_width
    return element * 4 * shape.query_width + shape.heads * config.dataset.max_length * in_fp32_too(config)
