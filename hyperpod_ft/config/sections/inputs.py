"""What a run starts from: sections `model` and `dataset`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from hyperpod_ft.config.fields import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Revision,
    Section,
    Share,
    Source,
    matches,
    shortened,
)
from hyperpod_ft.config.sources import Asset, names_one_file


class Model(Section):
    """The base model."""

    source: Source = Field(
        description="A Hugging Face Hub id (`meta-llama/Meta-Llama-3-8B`), an `s3://bucket/prefix`, a local directory"
        " (absolute, or starting with `.`), or `example:tiny-llama`, which is included."
    )
    revision: Revision | None = Field(
        None, description="Hub commit (recommended), tag or branch; `main` if not set. Only for Hub ids."
    )


# A split or a slice of one, as Hugging Face datasets write it.
SPLIT = r"\w+(\.\w+)*(\[(-?\d{1,18}%?)?:(-?\d{1,18}%?)?\])?"


Format = Literal["dolly", "alpaca", "prompt-completion", "chat", "text", "template", "preference"]


class SourceSettings(Section):
    """What is read of a source, and what its rows are."""

    source: Source | None = Field(
        None,
        description="A Hub dataset id, an `s3://` URI, a local file or directory (absolute, or starting with `.`),"
        " `example:requests`, `example:preferences` or `example:qa`.",
    )
    revision: Revision | None = Field(None, description="Hub commit, tag or branch. Only for Hub ids.")
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
        description="Which files are read, by split names in their names or directories (docs/your-own-data.md): a"
        " split, `all`, or some rows, as in `train[:90%]` and `train[:500]`.",
    )
    format: Format | None = Field(
        None,
        description="`dolly` (instruction, context, response), `alpaca` (instruction, input, output),"
        " `prompt-completion` (prompt, completion), `chat` (messages, with the tokenizer's chat template),"
        " `text` (text), `template` (the two templates below), or `preference` (prompt, chosen, rejected:"
        " strings or chat messages, for training.objective dpo).",
    )
    prompt_template: str | None = Field(None, description="Format `template`: Jinja template of the row's fields.")
    completion_template: str | None = Field(None, description="The same for the completion.")

    @model_validator(mode="after")
    def _templates_belong_to_their_format(self) -> "SourceSettings":
        given = self.prompt_template is not None or self.completion_template is not None
        if self.format is None:
            return self
        if self.format == "template" and self.completion_template is None:
            raise ValueError("format template needs completion_template (and usually prompt_template); add it")
        if self.format != "template" and given:
            raise ValueError(f"prompt_template and completion_template are for format template, not {self.format}")
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


class DataSource(SourceSettings):
    """One source."""

    source: Source
    format: Format

    @property
    def asset(self) -> Asset:
        return Asset(self.source, self.revision or "")

    @property
    def split_name(self) -> str:
        """The split without its slice."""
        return self.split.partition("[")[0]


_NAME = r"[a-z0-9][a-z0-9_-]{0,63}"


class NamedSource(DataSource):
    """A source, or a list of them, whose examples are for validation alone; keys as in `dataset.sources`."""

    name: Annotated[str, matches(_NAME, "at most 64 lower-case letters, digits, hyphens and underscores")] | None = (
        Field(None, description="In reports; by default the last part of the source.")
    )

    @property
    def known_as(self) -> str:
        """Its name; by default the last part of the source, with the split if that is not `train`."""
        return self.name or default_name(self.source, self.split_name)


class TrainingSource(NamedSource):
    """Several sources, in place of `source`: a list, each with its own `source` to `completion_template`, and:"""

    weight: PositiveFloat | None = Field(
        None, description="Its share of an epoch's examples, beside the weights of the others."
    )
    rows: PositiveInt | None = Field(None, description="How many examples an epoch has of it.")


def default_name(source: str, split: str) -> str:
    """What a source is called that the run file gives no name."""
    last = source.rstrip("/").rsplit("/", 1)[-1].removeprefix("example:")
    stem = last.rpartition(".")[0] if names_one_file(last) else last
    given = stem if split == "train" else f"{stem}-{split}"
    return re.sub(r"[^a-z0-9_-]+", "-", given.lower()).strip("-_")[:64] or "data"


class Preparation(Section):
    """How rows are tokenized and packed, of whatever source."""

    ignored_columns: tuple[str, ...] = Field(
        (),
        description="Columns to ignore that would change the training and that the format does not use, such as"
        " `images`, `tools` or `messages.weight`. Stage `dataset` stops at others like these.",
    )
    max_length: Annotated[PositiveInt, Field(ge=8, le=1 << 20)] = Field(
        2048,
        description="Length of a packed row, in tokens; for an encoder-decoder, of the encoder's part.",
    )
    max_target_length: Annotated[PositiveInt, Field(ge=8, le=1 << 20)] | None = Field(
        None,
        description="Length of the decoder's part of a packed row, in tokens. Required for encoder-decoders (T5,"
        " Flan-T5), and only for them.",
    )
    loss_on: Literal["completion", "all"] = Field(
        "completion",
        description="Which tokens count in the loss: those of the completion, or the prompt's too. `text` rows have"
        " no prompt.",
    )
    packing: Literal["bfd", "wrapped", "none"] = Field(
        "bfd",
        description="`bfd` packs whole examples by best fit, `wrapped` concatenates all examples and cuts them into"
        " rows, `none` pads each example to a row.",
    )
    overlong: Literal["drop", "truncate"] = Field(
        "drop",
        description="What happens to examples longer than max_length or max_target_length: `drop` counts them as bad"
        " rows. No effect with packing `wrapped`.",
    )
    validation_share: Share = Field(0.02, description="Fraction of the raw rows held out for validation.")
    max_bad_rows: NonNegativeInt = Field(
        0,
        description="How many unusable raw rows are skipped and listed before the stage fails.",
    )
    workers: NonNegativeInt = Field(
        0,
        description="Tokenizing processes; 0: one per CPU of the job, with at least 4 MB of text each.",
    )

    @property
    def row_tokens(self) -> int:
        """The number of positions of a packed row, the decoder's included."""
        return self.max_length + (self.max_target_length or 0)


class Dataset(Preparation, DataSource):
    """One source, and how its rows are tokenized and packed."""

    @property
    def documents_per_example(self) -> int:
        """The number of documents that a raw row becomes: two for a preference, chosen and rejected."""
        return 2 if self.format == "preference" else 1

    @model_validator(mode="after")
    def _suits_an_encoder_decoder(self) -> "Dataset":
        if self.max_target_length is None:
            return self
        if self.format in ("chat", "text", "preference"):
            raise ValueError(
                f"format {self.format}: an encoder-decoder is trained on pairs of source and target; use"
                " prompt-completion, template, dolly or alpaca, or leave max_target_length out"
            )
        if self.loss_on == "all":
            raise ValueError("loss_on all: an encoder-decoder does not predict its prompt; set it to completion")
        if self.packing == "wrapped":
            raise ValueError("packing wrapped: would separate sources from their targets; set it to bfd or none")
        return self


@dataclass(frozen=True)
class Part:
    """One of the sources of a run's data."""

    key: str  # where the run file has it
    name: str
    dataset: Dataset
    trains: bool = True  # False: its examples are for validation alone
    weight: float | None = None
    rows: int | None = None


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


class Data(Preparation, SourceSettings):
    """The training data, and how it is tokenized and packed."""

    sources: tuple[TrainingSource, ...] = ()
    validation_source: Annotated[tuple[NamedSource, ...], BeforeValidator(_listed)] = ()
    deduplicate: bool = Field(
        False,
        description="Keeps one of examples with the same text: that of validation, or of the first source.",
    )

    @property
    def parts(self) -> tuple[Part, ...]:
        """The sources, each with the settings that all share: those to train on, then those for validation alone.

        One source is a list of one.
        """
        return (*self._trained_on(), *self._validated_on())

    def _trained_on(self) -> Iterator[Part]:
        if not self.sources:
            only = self._dataset(self)
            yield Part("dataset", default_name(only.source, only.split_name), only)
        for number, one in enumerate(self.sources):
            yield Part(f"dataset.sources.{number}", one.known_as, self._dataset(one), weight=one.weight, rows=one.rows)

    def _validated_on(self) -> Iterator[Part]:
        for number, one in enumerate(self.validation_source):
            yield Part(f"dataset.validation_source.{number}", one.known_as, self._dataset(one), trains=False)

    def _dataset(self, selection: SourceSettings) -> Dataset:
        values = {key: getattr(selection, key) for key in SourceSettings.model_fields}
        shared = {key: getattr(self, key) for key in Preparation.model_fields}
        return Dataset.model_construct(**values, **shared)

    @property
    def validates(self) -> bool:
        """Whether rows are held out, or come from a source of their own."""
        return self.validation_share > 0 or bool(self.validation_source)

    @property
    def mixes(self) -> bool:
        """Whether an epoch may be anything else than every example of one source."""
        return bool(self.sources or self.validation_source or self.deduplicate)

    @property
    def formats(self) -> tuple[str, ...]:
        """Those of the sources, each once, in their order."""
        return tuple(dict.fromkeys(part.dataset.format for part in self.parts))

    @property
    def has_preferences(self) -> bool:
        """Whether all rows are preferences; they are not mixed with others."""
        return "preference" in self.formats

    @property
    def documents_per_example(self) -> int:
        return self.parts[0].dataset.documents_per_example

    @property
    def questions(self) -> Dataset:
        """The source that a question to the model is written as a row of.

        The tokenizer's chat template asks if any rows are chats; else the first source that has questions does.
        """
        trained = [part.dataset for part in self._trained_on()]
        return min(trained, key=lambda dataset: {"chat": 0, "text": 2}.get(dataset.format, 1))

    @model_validator(mode="after")
    def _sources_go_together(self) -> "Data":
        if self.sources:
            for key, field in SourceSettings.model_fields.items():
                if getattr(self, key) != field.default:
                    raise ValueError(f"{key}: {_beside_sources(key)}")
        else:
            DataSource.model_validate(_given(self, SourceSettings))  # its errors name the keys that are missing
        for part in self.parts:
            Dataset.model_validate(_given(part.dataset, Dataset))
        if self.has_preferences and len(self.formats) > 1:
            others = ", ".join(name for name in self.formats if name != "preference")
            raise ValueError(f"format preference cannot be mixed with {others}; train on them in different runs")
        self._check_names()
        self._check_weights()
        return self

    def _check_names(self) -> None:
        seen: dict[str, str] = {}
        for part in self.parts:
            if part.name in seen:
                raise ValueError(
                    f"{part.key.removeprefix('dataset.')}.name: {part.name} is also the name of {seen[part.name]}; give"
                    " one of them another"
                )
            seen[part.name] = part.key

    def _check_weights(self) -> None:
        weighted = [number for number, one in enumerate(self.sources) if one.weight is not None]
        if weighted and len(weighted) < len(self.sources):
            missing = min(set(range(len(self.sources))).difference(weighted))
            raise ValueError(f"sources.{missing}.weight: is missing; give every source a weight, or none")
        for number, one in enumerate(self.sources):
            if one.weight is not None and one.rows is not None:
                raise ValueError(f"sources.{number}: has weight and rows; give one of them")


def _given(section: Section, kind: type[Section]) -> dict[str, Any]:
    """The keys of `kind` that are set."""
    values = {key: getattr(section, key) for key in kind.model_fields}
    return {key: value for key, value in values.items() if value is not None}


def _beside_sources(key: str) -> str:
    if key == "source":
        return "cannot be given together with sources; make it one of them"
    return "has no effect beside sources; move it into each of them"
