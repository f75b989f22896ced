"""Settings of engine neuron: section `neuron`."""

from pydantic import Field

from hyperpod_ft.config.fields import PositiveInt, Section


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
