"""Both models' answers and losses as they are shown in the log of a job."""

import textwrap

from hyperpod_ft.runs.results.samples import RecordedAnswers, SampledRow, Samples
from hyperpod_ft.terminal import printable

_COLUMN = 48


def as_text(samples: Samples) -> str:
    """Plain text: base left, tuned right."""
    lines = [line for answers in samples.prompts for line in _side_by_side("prompts", answers)]
    lines += [line for row in samples.samples for line in _side_by_side(row.split, row)]
    lines += [exact.line(split) for split, exact in samples.exact_match.items() if exact.rows]
    if losses := samples.validation_loss:
        of = losses.base
        part = "" if of.rows == of.rows_available else f", first {of.rows} of {of.rows_available} rows"
        means = f"base {of.mean:.4f}, tuned {losses.tuned.mean:.4f}"
        lines.append(f"validation loss: {means} ({of.tokens} tokens{part})")
    return "\n".join(lines)


def _side_by_side(origin: str, answers: RecordedAnswers | SampledRow) -> list[str]:
    lines = [f"[{origin}]"]
    lines += [f"  {line}" for line in printable(answers.prompt, keep="\n").splitlines() if line.strip()]
    marks = ["", ""]
    if isinstance(answers, SampledRow):
        lines += _wrapped("  expected: ", answers.expected)
        marks = [" =" if exact else "" for exact in (answers.base_exact, answers.tuned_exact)]
    left, right = (
        textwrap.wrap(printable(text, keep="\n"), _COLUMN) or ["(nothing)"] for text in (answers.base, answers.tuned)
    )
    lines.append(f"  {'base' + marks[0]:{_COLUMN}} | tuned{marks[1]}")
    for number in range(max(len(left), len(right))):
        one, other = (column[number] if number < len(column) else "" for column in (left, right))
        lines.append(f"  {one:{_COLUMN}} | {other}".rstrip())
    return [*lines, ""]


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        printable(text, keep="\n"), 2 * _COLUMN, initial_indent=label, subsequent_indent=" " * len(label)
    )
