"""What a run makes of its training: sections `merge`, `generate` and `evaluation`."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from hyperpod_ft.config.fields import NonNegativeInt, PlainPath, PositiveFloat, PositiveInt, Revision, Section, matches


class Merge(Section):
    """The tuned model, even with training.method full."""

    dtype: Literal["base", "bfloat16", "float16", "float32"] = Field(
        "base", description="dtype of its weights; `base` keeps that of each tensor of the base model."
    )
    max_shard_size_gb: PositiveFloat = Field(5.0, description="Maximum size of a safetensors file, in GB (1e9 bytes).")


class Generate(Section):
    """The comparison of the base and the tuned model, by their answers."""

    prompts: tuple[str | dict[str, Any], ...] = Field(
        (),
        description="Prompts to answer: rows in the dataset's format, or strings. A string is a user's message if the"
        " rows are chats, otherwise a text to continue. Images are files, relative to the run file.",
    )
    max_new_tokens: PositiveInt = Field(64, description="Longest answer, in tokens.")
    train_samples: NonNegativeInt = Field(
        8,
        le=256,
        description="Training samples, drawn once, whose answers are compared with the expected ones.",
    )
    validation_samples: NonNegativeInt = Field(
        8,
        le=256,
        description="The same of validation samples.",
    )
    answer_pattern: str | None = Field(
        None,
        max_length=500,
        description="Regular expression (Python's) for the part of an answer that counts: its first group, or the"
        " whole match. Example: `#### (-?[0-9.,]+)` (docs/your-own-data.md).",
    )
    rouge: bool | None = Field(
        None, description="Score samples' answers by ROUGE (F1, no stemming). If not set: for encoder-decoders."
    )

    @field_validator("prompts")
    @classmethod
    def _have_text(cls, value: tuple[str | dict[str, Any], ...]) -> tuple[str | dict[str, Any], ...]:
        for number, prompt in enumerate(value):
            if isinstance(prompt, str) and not prompt.strip():
                raise ValueError(f"number {number} is empty; write a prompt with text")
        return value

    @field_validator("answer_pattern")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"is not a regular expression: {error}; correct it") from error
        return value


# Names of tasks, groups and tags; the harness would read `*` and `?` as patterns.
TaskName = Annotated[
    str, matches(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}", "the name of one task: letters, digits and . _ + -")
]


class Eval(Section):
    """Benchmarks of lm-evaluation-harness for the base and the tuned model. Stage `eval` exists only with it."""

    tasks: tuple[TaskName, ...] = Field(
        min_length=1,
        max_length=100,
        description="Tasks, groups or tags of lm-evaluation-harness, or YAML files in `include_path`.",
    )
    num_fewshot: NonNegativeInt | None = Field(
        None, le=1000, description="Solved examples before each question; the task's own number if not set."
    )
    limit: PositiveInt | None = Field(
        None,
        description="Only the first questions of each task: for trials, not for benchmark results.",
    )
    batch_size: PositiveInt | Literal["auto"] = Field(
        1, description="Questions that the model reads at once; `auto`: the most that fit an accelerator."
    )
    apply_chat_template: bool = Field(
        False,
        description="Write questions with the tuned model's chat template, for both models. For a model tuned on"
        " chats.",
    )
    include_path: PlainPath | None = Field(
        None,
        description="Directory of your own tasks: YAML files, their Python functions and data. It is copied to"
        " `cluster.root`; paths in the YAML files are relative to it.",
    )
    include_revision: Revision | None = Field(None, description="Digest of `include_path`; set by the kit.")
    allow_code_execution: bool = Field(
        False,
        description="Allow tasks that run code written by the models, such as `humaneval` and `mbpp`, as your user.",
    )
    python: PlainPath | None = Field(
        None,
        description="Interpreter with lm-evaluation-harness (`lm_eval`), torch, transformers and the kit's"
        " packages; with `env.container`, in the image. If not set, stage `tasks` makes one on top of the run's.",
    )

    @field_validator("tasks")
    @classmethod
    def _each_task_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if repeated := next((name for name in value if value.count(name) > 1), None):
            raise ValueError(f"{repeated} is listed twice; remove one")
        return value
