"""Answers: what a pattern finds in one, and how those of both models are shown in the log of a job."""

import re
import signal
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

from hyperpod_ft.errors import printable
from hyperpod_ft.runs.results.samples import RecordedAnswers, SampledRow, Samples

_COLUMN = 48
_SECONDS = 1.0  # of looking for a pattern


def as_text(samples: Samples) -> str:
    """Plain text: base left, tuned right."""
    lines = [line for answers in samples.prompts for line in _side_by_side("prompts", answers)]
    lines += [line for row in samples.samples for line in _side_by_side(row.split, row.answers, row)]
    lines += samples.lines()
    if losses := samples.validation_loss:
        of = losses.base
        part = "" if of.rows == of.rows_available else f", first {of.rows} of {of.rows_available} rows"
        means = f"base {of.mean:.4f}, tuned {losses.tuned.mean:.4f}"
        lines.append(f"validation loss: {means} ({of.tokens} tokens{part})")
    for name, losses in samples.source_losses.items():
        means = f"base {losses.base.mean:.4f}, tuned {losses.tuned.mean:.4f}"
        lines.append(f"validation loss, {name}: {means} ({losses.base.tokens} tokens)")
    return "\n".join(lines)


def _side_by_side(origin: str, answers: RecordedAnswers, row: SampledRow | None = None) -> list[str]:
    lines = [f"[{origin}]", *_wrapped("  images: ", answers.image_names)]
    lines += [f"  {line}" for line in printable(answers.prompt, keep="\n").splitlines() if line.strip()]
    marks = ["", ""]
    if row:
        lines += _wrapped("  expected: ", row.expected)
        marks = [
            " =" if exact else " = by pattern" if by_pattern else ""
            for exact, by_pattern in (
                (row.base_exact, row.base_by_pattern),
                (row.tuned_exact, row.tuned_by_pattern),
            )
        ]
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


def found_in(pattern: re.Pattern[str], text: str) -> str | None:
    """The first match in `text`: its first group, or all of it if the pattern has none.

    None where there is no match, or looking for it takes more than a second: some patterns need ages for some texts,
    and a model may write any. Only for the main thread.
    """
    try:
        with _limited():
            match = pattern.search(text)
    except TimeoutError:
        return None
    found = match[1 if pattern.groups else 0] if match else None
    return None if found is None else found.strip()


@contextmanager
def _limited() -> Iterator[None]:
    """Raises TimeoutError after a second of computing; `re` looks for signals while it searches."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
