"""`samples.json`: both models' answers to the same prompts, and their losses; the result of stage generate."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError


@dataclass(frozen=True)
class ExactCount:
    """How many of a split's samples each model answered exactly."""

    rows: int
    base: int
    tuned: int

    def line(self, split: str) -> str:
        """For example `exact answers, train rows: base 1/8, tuned 6/8`."""
        return f"exact answers, {split} rows: base {self.base}/{self.rows}, tuned {self.tuned}/{self.rows}"


@dataclass(frozen=True)
class Loss:
    """A mean over the first `rows` of `rows_available` rows, in nats per label token, or for preferences per pair.

    `tokens`: how many label tokens there are.
    """

    mean: float
    tokens: int
    rows: int
    rows_available: int


@dataclass(frozen=True)
class Losses:
    """Both models on the same validation rows."""

    base: Loss
    tuned: Loss


@dataclass(frozen=True)
class RecordedAnswers:
    """Both models' answers to a prompt. `templated`: a chat template wrote the prompt, with all special tokens."""

    prompt: str
    templated: bool
    base: str
    tuned: str


@dataclass(frozen=True)
class SampledRow:
    """Both models' answers to the prompt of a sample, which is a raw row. `expected`: the completion in the dataset."""

    split: Literal["train", "validation"]
    prompt: str
    templated: bool
    expected: str
    base: str
    tuned: str
    base_exact: bool
    tuned_exact: bool

    @classmethod
    def of(cls, split: Literal["train", "validation"], answers: RecordedAnswers, expected: str) -> "SampledRow":
        return cls(
            split=split,
            prompt=answers.prompt,
            templated=answers.templated,
            expected=expected,
            base=answers.base,
            tuned=answers.tuned,
            base_exact=answers.base.strip() == expected.strip(),
            tuned_exact=answers.tuned.strip() == expected.strip(),
        )

    @property
    def answers(self) -> RecordedAnswers:
        return RecordedAnswers(self.prompt, self.templated, self.base, self.tuned)


@dataclass(frozen=True)
class Samples:
    """The file: first the numbers that are also in the stage's record, then all answers.

    `answers_changed`: how many of the `answers` differ between the two models, token by token.
    """

    exact_match: dict[Literal["train", "validation"], ExactCount]
    validation_loss: Losses | None
    answers: int
    answers_changed: int
    prompts: tuple[RecordedAnswers, ...]
    samples: tuple[SampledRow, ...]

    @classmethod
    def of(
        cls,
        prompts: Sequence[RecordedAnswers],
        samples: Sequence[SampledRow],
        answers_changed: int,
        validation_loss: Losses | None,
    ) -> "Samples":
        return cls(
            exact_match={"train": _exact(samples, "train"), "validation": _exact(samples, "validation")},
            validation_loss=validation_loss,
            answers=len(prompts) + len(samples),
            answers_changed=answers_changed,
            prompts=tuple(prompts),
            samples=tuple(samples),
        )

    @property
    def unchanged(self) -> bool:
        """Whether answers and validation losses show no difference at all."""
        losses = self.validation_loss
        same_loss = losses is not None and losses.base.mean == losses.tuned.mean
        return self.answers > 0 and not self.answers_changed and same_loss

    @property
    def all_answers(self) -> list[RecordedAnswers]:
        """To the run file's prompts, then to the samples."""
        return [*self.prompts, *(row.answers for row in self.samples)]

    def summary(self) -> dict[str, Any]:
        """The numbers alone, for the stage's record."""
        return {name: value for name, value in asdict(self).items() if name not in ("prompts", "samples")}

    def write(self, path: Path) -> None:
        publish.write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> "Samples":
        """Raises UserError when the file is damaged."""
        try:
            return _SAMPLES.validate_json(path.read_bytes())
        except ValueError as error:
            raise UserError(f"{path}: is damaged", "run stage generate again") from error


def _exact(samples: Sequence[SampledRow], split: Literal["train", "validation"]) -> ExactCount:
    rows = [row for row in samples if row.split == split]
    return ExactCount(len(rows), sum(row.base_exact for row in rows), sum(row.tuned_exact for row in rows))


_SAMPLES = TypeAdapter(Samples)
