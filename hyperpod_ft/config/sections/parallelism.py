"""How the model is split over the ranks: sections `parallelism`, and `neuron` with the settings of engine neuron."""

from typing import Literal

from pydantic import Field

from hyperpod_ft.config.fields import PositiveInt, Section


class Parallelism(Section):
    """How the model is split over the ranks; the remaining ranks are data-parallel."""

    degrees: Literal["manual", "auto"] = Field(
        "manual",
        description="`auto` chooses tensor_parallel, pipeline_parallel and context_parallel: the fastest that fit, by"
        " estimates (engine torch). `plan` shows them.",
    )
    tensor_parallel: PositiveInt | None = Field(
        None,
        description="Ranks of one node that share each layer's matrices (not engine trl). If not set: 8 on trn1, 4 on"
        " trn2, otherwise 1.",
    )
    pipeline_parallel: PositiveInt = Field(
        1,
        description="Ranks that share the layers as parts of a pipeline (not engine trl). Engine torch needs at least"
        " as many gradient_accumulation_steps, its micro batches.",
    )
    pipeline_schedule: Literal["1f1b", "interleaved", "gpipe"] = Field(
        "1f1b",
        description="Order of the micro batches (engine torch): `1f1b` (one forward, one backward), `interleaved`"
        " (1F1B with several pipeline parts on a rank) or `gpipe` (all forward passes first); docs/parallelism.md.",
    )
    virtual_pipeline_parallel: PositiveInt = Field(
        2, ge=2, description="Pipeline parts on each rank with schedule `interleaved` (engine torch)."
    )
    context_parallel: PositiveInt = Field(
        1, description="Ranks that share each row's tokens, for long rows (engine torch)."
    )
    expert_parallel: PositiveInt = Field(
        1,
        description="Neighboring ranks that divide the experts of each layer (engine torch).",
    )
    sequence_parallel: bool | None = Field(
        None,
        description="Also divide the activations outside attention and MLP over the tensor-parallel ranks (engine"
        " torch). If not set: on if tensor_parallel x context_parallel divides dataset.max_length.",
    )
    ranks_per_node: PositiveInt | None = Field(
        None,
        description="Training processes per node. If not set: one per accelerator (logical NeuronCore or GPU); required"
        " without accelerators.",
    )
    sharding: Literal["auto", "replicated", "zero1", "zero2", "zero3"] = Field(
        "auto",
        description="What is divided over the data-parallel ranks (engines torch and trl): nothing (`replicated`), the"
        " optimizer's state (`zero1`, not engine trl), gradients too (`zero2`), weights too (`zero3`). `auto`: the"
        " first of them that fits (docs/parallelism.md).",
    )
    shard_ranks: PositiveInt | None = Field(
        None,
        description="Number of data-parallel ranks that divide the state (engine torch). Each further group of this"
        " size holds a replica (hybrid sharding). If not set: all, or with `auto` those of a node if that fits.",
    )
    offload: Literal["none", "optimizer", "parameters"] = Field(
        "none",
        description="What is kept in host memory (engine torch): `optimizer` (AdamW's state and fp32 weights, updated"
        " on the CPU), or `parameters` (the weights too, uploaded layer by layer).",
    )


class Neuron(Section):
    """Settings of engine neuron; other engines ignore them."""

    sequence_parallel: bool = Field(
        True,
        description="As `parallelism.sequence_parallel`. bf16 with tensor parallelism requires it.",
    )
    flash_attention: bool | None = Field(
        None,
        description="Use Neuron's flash attention kernel. If not set: when dataset.max_length is a multiple of 2048,"
        " which it needs.",
    )
    zero_1: bool = Field(True, description="Shard the optimizer state over the data-parallel ranks (ZeRO-1).")
    master_weights: bool = Field(
        True, description="With bf16 and ZeRO-1: keep fp32 weights in the optimizer and accumulate gradients in fp32."
    )
    stochastic_rounding: bool = Field(True, description="Round to bf16 stochastically.")
    fuse_qkv: bool = Field(False, description="Fuse the query, key and value projections into one matrix.")
    xser: bool = Field(True, description="Write each tensor of a checkpoint to its own file, directly from the device.")
    precompile_steps: PositiveInt = Field(
        10,
        le=1000,
        description="Steps of the trial run in which `precompile` collects graphs; AWS recommends 10 to 15.",
    )
