"""How the model is split over the ranks: sections `parallelism`, and `neuron` with the settings of engine neuron."""

from typing import Literal

from pydantic import Field

from hyperpod_ft.config.fields import PositiveInt, Section
from hyperpod_ft.config.sections import EXPERIMENTAL_ON_GPUS


class Parallelism(Section):
    """How the model is split over the ranks; the remaining ranks are data-parallel."""

    degrees: Literal["manual", "auto"] = Field(
        "manual",
        description="`auto` chooses tensor_parallel, pipeline_parallel and context_parallel: of the degrees that fit,"
        " those with the highest estimated tokens per second (engine torch). `hyperpod-ft plan` shows the choice.",
    )
    tensor_parallel: PositiveInt | None = Field(
        None,
        description="Number of ranks, on one node, that share each layer's matrices. If not set: 8 on trn1, 4 on trn2,"
        " otherwise 1.",
    )
    pipeline_parallel: PositiveInt = Field(
        1,
        description="Number of ranks that share the layers as stages of a pipeline. With engine torch, the"
        " training.gradient_accumulation_steps micro batches of a step pass through it: at least as many as ranks.",
    )
    pipeline_schedule: Literal["1f1b", "interleaved", "gpipe"] = Field(
        "1f1b",
        description="Order of the micro batches in a pipeline (engine torch): `1f1b` (one forward, one backward),"
        " `interleaved` (1F1B with several stages on a rank: idle for less time, more communication), or `gpipe` (all"
        " forward passes first, which needs the most memory).",
    )
    virtual_pipeline_parallel: PositiveInt = Field(
        2, ge=2, description="Number of stages on each rank with pipeline_schedule `interleaved`."
    )
    context_parallel: PositiveInt = Field(
        1, description="Number of ranks that share each row's tokens, for long rows (engine torch)."
    )
    sequence_parallel: bool | None = Field(
        None,
        description="With tensor_parallel, divide the activations between attention and MLP over its ranks too, by"
        " position (engine torch; engine neuron has neuron.sequence_parallel). Saves memory at the same communication"
        " volume. If not set: when tensor_parallel x context_parallel divides dataset.max_length.",
    )
    ranks_per_node: PositiveInt | None = Field(
        None, description="Training processes per node; one per accelerator (logical NeuronCore or GPU) if not set."
    )
    sharding: Literal["auto", "replicated", "zero1", "zero2", "zero3"] = Field(
        "auto",
        description="What is divided over the data-parallel ranks instead of replicated on each (engine torch):"
        " nothing (`replicated`), the optimizer's state (`zero1`), gradients too (`zero2`), weights too (`zero3`)."
        " `auto` chooses the fastest that fits. docs/parallelism.md compares them. All are"
        f" {EXPERIMENTAL_ON_GPUS}",
    )
    shard_ranks: PositiveInt | None = Field(
        None,
        description="Number of data-parallel ranks over which the state is sharded; each further group of this size"
        " holds a replica (hybrid sharding). If not set: all of them, or with `auto` those of a node if that fits.",
    )
    offload: Literal["none", "optimizer", "parameters"] = Field(
        "none",
        description="What is kept in host memory (engine torch): with `optimizer` AdamW's state and fp32 weights,"
        " updated on the CPU; with `parameters` the weights too, uploaded layer by layer. It is"
        f" {EXPERIMENTAL_ON_GPUS}",
    )


class Neuron(Section):
    """Settings of engine neuron; engine torch ignores them."""

    sequence_parallel: bool = Field(
        True,
        description="Divide the activations outside attention and MLP over the tensor-parallel ranks. Saves memory,"
        " and is required for bf16 with tensor parallelism.",
    )
    flash_attention: bool | None = Field(
        None,
        description="Use Neuron's flash attention kernel, for which dataset.max_length must be a multiple of 2048. If"
        " not set, it is used when that is the case.",
    )
    zero_1: bool = Field(True, description="ZeRO-1: shard the optimizer state over the data-parallel ranks.")
    master_weights: bool = Field(
        True, description="bf16 with ZeRO-1: keep fp32 weights in the optimizer and accumulate gradients in fp32."
    )
    stochastic_rounding: bool = Field(True, description="Round to bf16 stochastically.")
    fuse_qkv: bool = Field(False, description="Fuse the query, key and value projections into one matrix.")
    xser: bool = Field(
        True, description="Write each tensor of a checkpoint to a separate file, directly from the device."
    )
    precompile_steps: PositiveInt = Field(
        10,
        le=1000,
        description="Steps of the trial run in which `precompile` collects the graphs to compile; AWS recommends 10"
        " to 15.",
    )
