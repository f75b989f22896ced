"""Base and tuned model's answers to the same prompts, and how they are shown."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hyperpod_ft.runs.results.samples import ExactCount, Losses, RecordedAnswers, SampledRow, Samples
from hyperpod_ft.terminal import printable

_COLUMN = 48


@dataclass(frozen=True)
class AnswerPair:
    """One prompt with both answers. `expected` is the dataset's completion, for samples of it.

    `templated`: a chat template wrote the prompt, with all special tokens.
    """

    origin: Literal["prompts", "train", "validation"]
    prompt: str
    base: str
    tuned: str
    same: bool  # token by token
    expected: str | None = None
    templated: bool = False

    @property
    def base_exact(self) -> bool:
        return self.expected is not None and self.base.strip() == self.expected.strip()

    @property
    def tuned_exact(self) -> bool:
        return self.expected is not None and self.tuned.strip() == self.expected.strip()


@dataclass(frozen=True)
class Comparison:
    """Both models' answers and losses: the result of stage generate."""

    compared: Sequence[AnswerPair]
    validation: Losses | None

    def exact(self, split: Literal["train", "validation"]) -> ExactCount:
        rows = [row for row in self.compared if row.origin == split]
        return ExactCount(len(rows), sum(row.base_exact for row in rows), sum(row.tuned_exact for row in rows))

    @property
    def changed(self) -> bool:
        """Whether any answer of the tuned model differs from the base model's."""
        return any(not row.same for row in self.compared)

    @property
    def unchanged(self) -> bool:
        """Whether answers and validation losses show no difference at all."""
        same_loss = self.validation is not None and self.validation.base.mean == self.validation.tuned.mean
        return bool(self.compared) and not self.changed and same_loss

    def samples(self) -> Samples:
        return Samples(
            exact_match={"train": self.exact("train"), "validation": self.exact("validation")},
            validation_loss=self.validation,
            answers=len(self.compared),
            answers_changed=sum(not row.same for row in self.compared),
            prompts=tuple(
                RecordedAnswers(row.prompt, row.templated, row.base, row.tuned)
                for row in self.compared
                if row.origin == "prompts"
            ),
            samples=tuple(
                SampledRow(
                    split=row.origin,
                    prompt=row.prompt,
                    templated=row.templated,
                    expected=row.expected or "",
                    base=row.base,
                    tuned=row.tuned,
                    base_exact=row.base_exact,
                    tuned_exact=row.tuned_exact,
                )
                for row in self.compared
                if row.origin != "prompts"
            ),
        )

    def as_text(self) -> str:
        """The comparison as plain text for the log of a job: base left, tuned right."""
        lines = [line for row in self.compared for line in _side_by_side(row)]
        for split in ("train", "validation"):
            exact = self.exact(split)
            if exact.rows:
                lines.append(exact.line(split))
        if self.validation:
            of = self.validation.base
            part = "" if of.rows == of.rows_available else f", first {of.rows} of {of.rows_available} rows"
            losses = f"base {of.mean:.4f}, tuned {self.validation.tuned.mean:.4f}"
            lines.append(f"validation loss: {losses} ({of.tokens} tokens{part})")
        return "\n".join(lines)


def _side_by_side(row: AnswerPair) -> list[str]:
    lines = [f"[{row.origin}]"]
    lines += [f"  {line}" for line in printable(row.prompt, keep="\n").splitlines() if line.strip()]
    if row.expected is not None:
        lines += _wrapped("  expected: ", row.expected)
    left, right = (
        textwrap.wrap(printable(text, keep="\n"), _COLUMN) or ["(nothing)"] for text in (row.base, row.tuned)
    )
    marks = [" =" if exact else "" for exact in (row.base_exact, row.tuned_exact)]
    lines.append(f"  {'base' + marks[0]:{_COLUMN}} | tuned{marks[1]}")
    for number in range(max(len(left), len(right))):
        one, other = (column[number] if number < len(column) else "" for column in (left, right))
        lines.append(f"  {one:{_COLUMN}} | {other}".rstrip())
    return [*lines, ""]


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        printable(text, keep="\n"), 2 * _COLUMN, initial_indent=label, subsequent_indent=" " * len(label)
    )
