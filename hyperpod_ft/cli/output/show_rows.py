"""Rows on the terminal, token by token: a line or more for each stretch of tokens, with the reason beside it."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hyperpod_ft.cli.output.tables import console, table
from hyperpod_ft.data.inspection.examples import ShownRow
from hyperpod_ft.data.inspection.shown import MEANINGS, Reason, ShownDocument, ShownExample, Stretch, heading, tallies
from hyperpod_ft.errors import printable

_TRAINED: dict[Reason, str] = {"reasoning": "magenta", "end of turn": "yellow", "EOS": "yellow", "template": "cyan"}
_NOT_TRAINED: dict[Reason, str] = dict.fromkeys(("system", "user", "tool", "assistant", "prompt"), "")
_BETWEEN = "·"
_MOST_REPEATS = 3


def rows(found: Sequence[ShownRow]) -> None:
    """Print rows, and what their reasons mean. A `+` marks what is trained, on a terminal a color too."""
    screen = console()
    examples = [(row, number, example) for row in found for number, example in enumerate(row.examples, 1)]
    for row, number, example in examples:
        said = heading(example, number, len(row.examples))
        screen.print(Text(printable(row.where), style="bold"), *([Text(printable(said))] if said else []))
        for document in example.documents:
            _document(document, screen)
    if examples:
        _legend([example for _, _, example in examples], screen)


def _document(document: ShownDocument, screen: Console) -> None:
    name = f"{document.name}: " if document.name else ""
    share = f"{document.trained / document.tokens:.1%}"
    screen.print(f"{name}{document.tokens:,} tokens, {document.trained:,} of them trained ({share})\n")
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for stretch in document.stretches:
        style = _TRAINED.get(stretch.reason, "green") if stretch.trained else _NOT_TRAINED.get(stretch.reason, "dim")
        mark = "+" if stretch.trained else ""
        grid.add_row(
            mark,
            Text(stretch.reason, style=style),
            _tokens(stretch, style, screen.color_system is not None),
            style=style,
        )
    screen.print(grid)
    screen.print()


def _tokens(stretch: Stretch, style: str, has_styles: bool) -> Text:
    """Tokens whose borders can be seen: every second one is underlined, or a dot is between them."""
    text = Text(style=style)
    tokens = _without_repeats(stretch.tokens) if stretch.reason == "template" else stretch.tokens
    for number, token in enumerate(tokens):
        if text and not has_styles and not text.plain.endswith("\n"):
            text.append(_BETWEEN)
        text.append(_visible(token), style="underline" if has_styles and number % 2 else "")
    if text.plain.endswith("\n"):
        text.right_crop(1)
    return text


def _without_repeats(tokens: Sequence[str]) -> Iterator[str]:
    """Tokens of which many in a row, as an image has them, are one with their number."""
    for token, same in groupby(tokens):
        count = len(list(same))
        yield from [token] * count if count <= _MOST_REPEATS else [f"{token} {count:,} times"]


def _visible(token: str) -> str:
    return printable(token.replace("\t", "⇥").replace("\r", "␍").replace("\n", "↵\n"), keep="\n")


def _legend(examples: Sequence[ShownExample], screen: Console) -> None:
    listed = table("", "tokens", "trained", "")
    for tally in tallies(examples):
        listed.add_row(tally.reason, f"{tally.tokens:,}", f"{tally.trained:,}", MEANINGS[tally.reason])
    screen.print(listed)
