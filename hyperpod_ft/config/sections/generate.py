"""Section `generate` of a run file: the comparison of the base model and the tuned one."""

from typing import Any

from pydantic import Field

from hyperpod_ft.config.fields import NonNegativeInt, PositiveInt, Section


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
        description="Number of training samples, drawn once, whose answers are compared with the expected ones.",
    )
    validation_samples: NonNegativeInt = Field(
        8,
        le=256,
        description="Number of validation samples, drawn once, whose answers are compared with the expected ones.",
    )
