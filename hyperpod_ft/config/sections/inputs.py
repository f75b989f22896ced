"""What a run starts from: section `model`, and one source of section `dataset`, which data.py has."""

from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from hyperpod_ft.config.fields import (
    NonNegativeInt,
    PositiveInt,
    Revision,
    Section,
    Share,
    Source,
    matches,
    shortened,
    shown,
)
from hyperpod_ft.config.sources import Asset


class Pinned(Section):
    """What comes from a source, pinned to a revision."""

    source: Source
    revision: Revision | None = None

    @property
    def asset(self) -> Asset:
        return Asset(self.source, self.revision or "")


class StartingAdapter(Pinned):
    """A LoRA adapter of that model, which training continues (engine torch; docs/methods.md)."""

    source: Source = Field(
        description="A Hub id, an `s3://bucket/prefix` or a local directory, with `adapter_config.json` and"
        " `adapter_model.safetensors`."
    )
    revision: Revision | None = Field(None, description="As `model.revision`.")


_Token = Annotated[str, StringConstraints(min_length=1)]


class Model(Pinned):
    """The base model."""

    source: Source = Field(
        description="A Hugging Face Hub id (`meta-llama/Meta-Llama-3-8B`), an `s3://bucket/prefix`, a local directory"
        " (absolute, or starting with `.`), or `example:tiny-llama` and `example:tiny-qwen3-vl`, which are included."
    )
    revision: Revision | None = Field(
        None, description="Hub commit (recommended), tag or branch; `main` if not set. Only for Hub ids."
    )
    adapter: StartingAdapter | None = None
    new_tokens: tuple[_Token, ...] = Field(
        (), description="Tokens to add to the tokenizer, such as `<tool>` (docs/methods.md)."
    )
    new_special_tokens: tuple[_Token, ...] = Field((), description="Special tokens to add, such as `<|im_end|>`.")

    @property
    def added_tokens(self) -> tuple[str, ...]:
        """Both kinds."""
        return (*self.new_tokens, *self.new_special_tokens)

    @model_validator(mode="after")
    def _has_each_token_once(self) -> "Model":
        if twice := [token for token, count in Counter(self.added_tokens).items() if count > 1]:
            raise ValueError(f"new_tokens: {shown(twice[0])} is there twice; remove one")
        return self

    @field_validator("adapter", mode="before")
    @classmethod
    def _named_by_source(cls, given: Any) -> Any:
        if isinstance(given, str):
            raise ValueError(f"write {{source: {given}}}")
        return given


# A split or a slice of one, as Hugging Face datasets write it.
SPLIT = r"\w+(\.\w+)*(\[(-?\d{1,18}%?)?:(-?\d{1,18}%?)?\])?"


Format = Literal[
    "dolly",
    "alpaca",
    "prompt-completion",
    "chat",
    "text",
    "template",
    "preference",
    "unpaired-preference",
    "prompt",
]
# whose rows are text, or messages that the tokenizer's chat template writes
TEXT_OR_MESSAGES: tuple[Format, ...] = ("preference", "unpaired-preference", "prompt")


class SourceSettings(Section):
    """What is read of a source, and what its rows are."""

    source: Source | None = Field(
        None,
        description="Required without `sources`. A Hub dataset id, an `s3://` URI, a local file or directory"
        " (absolute, or starting with `.`), `example:requests`, `example:preferences`, `example:feedback`,"
        " `example:pictures` or `example:qa`.",
    )
    revision: Revision | None = Field(None, description="As `model.revision`.")
    files: tuple[str, ...] = Field(
        ("*.jsonl", "*.json", "*.parquet"),
        min_length=1,
        description="Glob patterns of the files to read below the source.",
    )
    split: Annotated[
        str,
        matches(
            SPLIT,
            "a split, or rows of one, as in train[:90%]",
        ),
    ] = Field(
        "train",
        description="Which of the files are read, by the split in their names (docs/your-own-data.md). A split, `all`,"
        " or some rows, as in `train[:90%]` and `train[:500]`.",
    )
    format: Format | None = Field(
        None,
        description="Required without `sources`. `dolly` (instruction, context, response),"
        " `alpaca` (instruction, input, output), `prompt-completion` (prompt, completion),"
        " `chat` (messages or conversations, with tools; the tokenizer's chat template), `text` (text),"
        " `template` (the two templates below), `preference` (prompt, chosen, rejected: strings or chat messages),"
        " `unpaired-preference` (prompt, completion, and label: true or false), or `prompt` (prompt, and columns that"
        " rewards need). docs/methods.md says which objective needs which.",
    )
    prompt_template: str | None = Field(
        None, description="Formats `template` and `prompt`: Jinja template of the row's fields."
    )
    completion_template: str | None = Field(None, description="Format `template`: Jinja template of the completion.")

    @model_validator(mode="after")
    def _templates_belong_to_their_format(self) -> "SourceSettings":
        given = self.prompt_template is not None or self.completion_template is not None
        if self.format is None:
            return self
        if self.format == "template" and self.completion_template is None:
            raise ValueError("format template needs completion_template (and usually prompt_template); add it")
        if given and self.format not in ("template", "prompt"):
            raise ValueError(f"prompt_template and completion_template are for format template, not {self.format}")
        if self.format == "prompt" and self.completion_template is not None:
            raise ValueError("completion_template: rows of format prompt have no completion; remove it")
        if given:
            self._check_templates()
        return self

    def _check_templates(self) -> None:
        from jinja2 import Environment, TemplateSyntaxError  # noqa: PLC0415 - only this format needs it

        for key in ("prompt_template", "completion_template"):
            try:
                Environment().parse(getattr(self, key) or "")  # noqa: S701 - only parsed
            except RecursionError as error:
                raise ValueError(f"{key}: is nested too deeply") from error
            except TemplateSyntaxError as error:
                raise ValueError(f"{key}: line {error.lineno}: {shortened(str(error.message))}") from error


class DataSource(SourceSettings, Pinned):
    """One source."""

    source: Source
    format: Format

    @property
    def split_name(self) -> str:
        """The split without its slice."""
        return self.split.partition("[")[0]


class Preparation(Section):
    """How rows are tokenized and packed, of whatever source."""

    ignored_columns: tuple[str, ...] = Field(
        (),
        description="Columns to ignore although they may matter, such as `images` (docs/your-own-data.md).",
    )
    images: bool = Field(
        False,
        description="Format `chat`: rows have images (engine trl; docs/methods.md#images).",
    )
    max_length: Annotated[PositiveInt, Field(ge=8, le=1 << 20)] = Field(
        2048,
        description="Length of a packed row, in tokens; for an encoder-decoder, of the encoder's part.",
    )
    max_target_length: Annotated[PositiveInt, Field(ge=8, le=1 << 20)] | None = Field(
        None,
        description="Length of the decoder's part of a packed row, in tokens (engine torch). Required for"
        " encoder-decoders (T5, Flan-T5), refused for others.",
    )
    loss_on: Literal["completion", "all"] = Field(
        "completion",
        description="Which tokens count in the loss: those of the completion, or also those of the prompt.",
    )
    train_on: Literal["all_turns", "last_turn"] = Field(
        "all_turns", description="Format `chat`: which of the assistant's turns are trained."
    )
    reasoning: Literal["train", "context", "drop"] = Field(
        "train",
        description="Format `chat`: what happens to reasoning. `context`: it does not count in the loss. `drop`: it is"
        " removed.",
    )
    chat_template_kwargs: dict[str, str | int | float | bool] = Field(
        {},
        description="Formats `chat`, `preference`, `unpaired-preference` and `prompt`: values for the chat template,"
        " such as `enable_thinking: false`. A row may have its own.",
    )
    packing: Literal["auto", "bfd", "wrapped", "none"] = Field(
        "auto",
        description="How examples fill rows. `bfd` packs whole examples by best fit. `wrapped` concatenates all"
        " examples and cuts them into rows. `none` pads each example to a row. `auto`: `bfd`, but `none` for models"
        " whose examples engine `torch` does not keep apart (docs/models.md).",
    )
    overlong: Literal["drop", "truncate"] = Field(
        "drop",
        description="What happens to examples longer than max_length or max_target_length. `drop` counts them as bad"
        " rows (max_bad_rows). No effect with packing `wrapped`.",
    )
    validation_share: Share = Field(0.02, description="Fraction of the raw rows held out for validation.")
    max_bad_rows: NonNegativeInt = Field(
        0,
        description="How many unusable raw rows are skipped. With more, stage `dataset` fails.",
    )
    workers: NonNegativeInt = Field(
        0,
        description="Tokenizing processes. 0: one per CPU of the job, with at least 4 MB of text each.",
    )

    @property
    def row_tokens(self) -> int:
        """The number of positions of a packed row, the decoder's included."""
        return self.max_length + (self.max_target_length or 0)


class Dataset(Preparation, DataSource):
    """One source, and how its rows are tokenized and packed."""

    @property
    def may_have_messages(self) -> bool:
        """Whether rows may be messages, which the tokenizer's chat template writes."""
        return self.format in ("chat", *TEXT_OR_MESSAGES)

    @property
    def has_answers(self) -> bool:
        """Whether rows have something to learn; prompts alone are answered by the model."""
        return self.format != "prompt"

    @property
    def documents_per_example(self) -> int:
        """The number of documents that a raw row becomes: two for a preference, chosen and rejected."""
        return 2 if self.format == "preference" else 1

    @model_validator(mode="after")
    def _suits_an_encoder_decoder(self) -> "Dataset":
        if self.max_target_length is None:
            return self
        if self.format in ("chat", "text", *TEXT_OR_MESSAGES):
            raise ValueError(
                f"format {self.format}: an encoder-decoder is trained on pairs of source and target; use"
                " prompt-completion, template, dolly or alpaca, or leave max_target_length out"
            )
        if self.loss_on == "all":
            raise ValueError("loss_on all: an encoder-decoder does not predict its prompt; set it to completion")
        if self.packing == "wrapped":
            raise ValueError("packing wrapped: would separate sources from their targets; set it to bfd or none")
        return self
