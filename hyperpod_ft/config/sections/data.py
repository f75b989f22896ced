"""Section `dataset`: one source, or several, and how all are prepared."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from hyperpod_ft.config.fields import PositiveFloat, PositiveInt, Section, matches
from hyperpod_ft.config.sections.inputs import TEXT_OR_MESSAGES, Dataset, DataSource, Preparation, SourceSettings
from hyperpod_ft.config.sources import names_one_file

_NAME = r"[a-z0-9][a-z0-9_-]{0,63}"


class NamedSource(DataSource):
    """A source, or a list of them, whose examples are for validation alone; keys as in `dataset.sources`."""

    name: Annotated[str, matches(_NAME, "at most 64 lower-case letters, digits, hyphens and underscores")] | None = (
        Field(None, description="Name in reports; by default the last part of the source.")
    )

    @property
    def known_as(self) -> str:
        """Its name; by default the last part of the source, with the split if that is not `train`."""
        return self.name or default_name(self.source, self.split_name)


class TrainingSource(NamedSource):
    """Several sources, in place of `source`: a list, each with its own `source` to `completion_template`, and:"""

    weight: PositiveFloat | None = Field(
        None, description="Its share of an epoch's examples, relative to the other weights."
    )
    rows: PositiveInt | None = Field(None, description="Number of its examples in an epoch.")


def default_name(source: str, split: str) -> str:
    """What a source is called that the run file gives no name."""
    last = source.rstrip("/").rsplit("/", 1)[-1].removeprefix("example:")
    stem = last.rpartition(".")[0] if names_one_file(last) else last
    given = stem if split == "train" else f"{stem}-{split}"
    return re.sub(r"[^a-z0-9_-]+", "-", given.lower()).strip("-_")[:64] or "data"


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
        description="Keep only one of several examples with the same text: validation's, or else the first source's.",
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
    def is_unpaired(self) -> bool:
        """Whether all rows are unpaired preferences, which are not mixed with others."""
        return "unpaired-preference" in self.formats

    @property
    def has_answers(self) -> bool:
        """Whether rows have something to learn: all of them, or none."""
        return self.parts[0].dataset.has_answers

    @property
    def may_have_messages(self) -> bool:
        """Whether rows may be messages, which the tokenizer's chat template writes."""
        return any(part.dataset.may_have_messages for part in self.parts)

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
        for alone in {*TEXT_OR_MESSAGES}.intersection(self.formats):
            if others := ", ".join(name for name in self.formats if name != alone):
                raise ValueError(f"format {alone} cannot be mixed with {others}; train on them in different runs")
        for key in ("train_on", "reasoning", "chat_template_kwargs"):
            wanted = ("chat", *TEXT_OR_MESSAGES) if key == "chat_template_kwargs" else ("chat",)
            if getattr(self, key) != type(self).model_fields[key].default and not set(wanted).intersection(
                self.formats
            ):
                raise ValueError(f"{key}: is for format {' and '.join(wanted)}, not {', '.join(self.formats)}")
        if self.loss_on == "all" and (self.train_on != "all_turns" or self.reasoning == "context"):
            raise ValueError("loss_on all: trains whole conversations; leave train_on out, and reasoning context")
        for name in self.chat_template_kwargs:
            if not name.isidentifier():
                raise ValueError(f"chat_template_kwargs: {name!r} is not a name that a template can have")
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
