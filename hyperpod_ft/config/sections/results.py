"""What is made of the trained weights: sections `merge` and `generate`."""

from typing import Any, Literal

from pydantic import Field

from hyperpod_ft.config.fields import NonNegativeInt, PositiveFloat, PositiveInt, Section


class Merge(Section):
    """The merged model."""

    dtype: Literal["base", "bfloat16", "float16", "float32"] = Field(
        "base", description="dtype of the merged weights; `base` keeps that of each tensor of the base model."
    )
    max_shard_size_gb: PositiveFloat = Field(5.0, description="Maximum size of a safetensors file, in GB (1e9 bytes).")


class Generate(Section):
    """The comparison of the base model and the fine-tuned one after the merge."""

    prompts: tuple[str | dict[str, Any], ...] = Field(
        (),
        description="Prompts to answer: rows in the dataset's format, which are rendered as in training, or strings."
        " Where the rows are chats, a string is the user's message; otherwise it is continued as it is.",
    )
    max_new_tokens: PositiveInt = Field(64, description="Maximum length of an answer, in tokens.")
    train_samples: NonNegativeInt = Field(
        8,
        le=256,
        description="Number of training rows, sampled once, whose answers are compared with the expected ones.",
    )
    validation_samples: NonNegativeInt = Field(8, le=256, description="The same for validation rows.")
