"""`samples.json`: both models' answers to the same prompts, and their losses; the result of stage generate."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import TypeAdapter

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True)
class AnswerCount:
    """How many of a split's samples each model answered as expected."""

    rows: int
    base: int
    tuned: int


@dataclass(frozen=True)
class Rouge:
    """ROUGE-1, -2 and -L of answers against the expected ones: means of F1, 0 to 1."""

    rouge_1: float
    rouge_2: float
    rouge_l: float

    def __str__(self) -> str:
        return f"{self.rouge_1:.3f}/{self.rouge_2:.3f}/{self.rouge_l:.3f}"


@dataclass(frozen=True)
class RougeScores:
    """Both models on a split's samples."""

    rows: int
    base: Rouge
    tuned: Rouge


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
class ShownImage:
    """`name`: of its file in the dataset, empty if its row contains it; `jpeg`: a small copy in base64, or empty."""

    name: str
    jpeg: str


@dataclass(frozen=True)
class RecordedAnswers:
    """Both models' answers to a prompt. `templated`: a chat template wrote the prompt, with all special tokens."""

    prompt: str
    templated: bool
    base: str
    tuned: str
    images: tuple[ShownImage, ...] = ()

    @property
    def image_names(self) -> str:
        return ", ".join(image.name for image in self.images if image.name)


@dataclass(frozen=True)
class SampledRow:
    """Both models' answers to the prompt of a sample, which is a raw row. `expected`: the completion in the dataset.

    `by_pattern`: whether `generate.answer_pattern` finds the same in the answer; None where it finds nothing in the
    expected one, or is not set.
    """

    split: Split
    prompt: str
    templated: bool
    expected: str
    base: str
    tuned: str
    base_exact: bool
    tuned_exact: bool
    base_by_pattern: bool | None = None
    tuned_by_pattern: bool | None = None
    images: tuple[ShownImage, ...] = ()

    @classmethod
    def of(
        cls, split: Split, answers: RecordedAnswers, expected: str, find: Callable[[str], str | None] | None = None
    ) -> "SampledRow":
        """`find`: what counts in an answer, None if there is nothing."""
        wanted = find(expected) if find else None
        counts = {
            f"{model}_by_pattern": find(answer) == wanted
            for model, answer in (("base", answers.base), ("tuned", answers.tuned))
            if find and wanted is not None
        }
        return cls(
            split=split,
            prompt=answers.prompt,
            templated=answers.templated,
            expected=expected,
            base=answers.base,
            tuned=answers.tuned,
            base_exact=answers.base.strip() == expected.strip(),
            tuned_exact=answers.tuned.strip() == expected.strip(),
            images=answers.images,
            **counts,
        )

    @property
    def answers(self) -> RecordedAnswers:
        return RecordedAnswers(self.prompt, self.templated, self.base, self.tuned, self.images)


@dataclass(frozen=True)
class Samples:
    """The file: first the numbers that are also in the stage's record, then all answers.

    `answers_changed`: how many of the `answers` differ between the two models, token by token.
    """

    exact_match: dict[Split, AnswerCount]
    pattern_match: dict[Split, AnswerCount]
    validation_loss: Losses | None
    answers: int
    answers_changed: int
    prompts: tuple[RecordedAnswers, ...]
    samples: tuple[SampledRow, ...]
    source_losses: Mapping[str, Losses] = field(default_factory=dict)
    """The validation losses over each of several sources, by name."""
    rouge: Mapping[Split, RougeScores] = field(default_factory=dict)
    """Of splits with samples, if it is wanted."""

    @classmethod
    def of(
        cls,
        prompts: Sequence[RecordedAnswers],
        samples: Sequence[SampledRow],
        answers_changed: int,
        validation_loss: Losses | None,
        source_losses: Mapping[str, Losses] = {},
        rouge: Mapping[Split, RougeScores] = {},
    ) -> "Samples":
        return cls(
            exact_match={split: _count(samples, split, "exact") for split in SPLITS},
            pattern_match={split: _count(samples, split, "by_pattern") for split in SPLITS},
            validation_loss=validation_loss,
            answers=len(prompts) + len(samples),
            answers_changed=answers_changed,
            prompts=tuple(prompts),
            samples=tuple(samples),
            source_losses=source_losses,
            rouge=rouge,
        )

    @property
    def counts(self) -> list[tuple[str, Split, AnswerCount]]:
        """How many answers of each split are as expected, and in what way; without those of which there are no rows."""
        kinds = (("exact answers", self.exact_match), ("answers by pattern", self.pattern_match))
        return [(kind, split, count) for kind, found in kinds for split, count in found.items() if count.rows]

    def lines(self) -> list[str]:
        """For example `exact answers, train rows: base 1/8, tuned 6/8`."""
        counts = [
            f"{kind}, {split} rows: base {count.base}/{count.rows}, tuned {count.tuned}/{count.rows}"
            for kind, split, count in self.counts
        ]
        rouge = self.rouge.items()
        return counts + [f"ROUGE-1/2/L, {split} rows: base {both.base}, tuned {both.tuned}" for split, both in rouge]

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

    @property
    def unseen_first(self) -> list[RecordedAnswers]:
        """Likewise, with the samples that the model was not trained on before the others."""
        held_out = [row.answers for row in self.samples if row.split == "validation"]
        return [*self.prompts, *held_out, *(row.answers for row in self.samples if row.split == "train")]

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


def _count(samples: Sequence[SampledRow], split: Split, kind: Literal["exact", "by_pattern"]) -> AnswerCount:
    """`rows`: those for which it is known."""
    base, tuned = (
        [known for row in samples if row.split == split and (known := getattr(row, f"{model}_{kind}")) is not None]
        for model in ("base", "tuned")
    )
    return AnswerCount(len(tuned), sum(base), sum(tuned))


_SAMPLES = TypeAdapter(Samples)
