"""Section `merge` of a run file: the merged model."""

from typing import Literal

from pydantic import Field

from hyperpod_ft.config.fields import PositiveFloat, Section


class Merge(Section):
    """The merged model."""

    dtype: Literal["base", "bfloat16", "float16", "float32"] = Field(
        "base", description="dtype of the merged weights; `base` keeps that of each tensor of the base model."
    )
    max_shard_size_gb: PositiveFloat = Field(5.0, description="Maximum size of a safetensors file, in GB (1e9 bytes).")
