"""Examples for a reader: their tokens as text, which of them are trained, and why each is there."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Literal

from hyperpod_ft import publish

Reason = Literal[
    "system",
    "user",
    "tool",
    "assistant",
    "header",
    "reasoning",
    "answer",
    "end of turn",
    "prompt",
    "completion",
    "text",
    "BOS",
    "EOS",
    "template",
    "cut",
    "not shown",
]
MEANINGS: dict[Reason, str] = {
    "system": "instructions of the system",
    "user": "what the user wrote",
    "tool": "what a tool returned",
    "assistant": "an answer that is context only",
    "header": "what asks for an answer, the generation prompt",
    "reasoning": "what is thought before an answer",
    "answer": "an answer of the assistant",
    "end of turn": "the token at which a server stops",
    "prompt": "what an answer follows",
    "completion": "what the model learns to answer",
    "text": "what the model learns to continue",
    "BOS": "begins the document",
    "EOS": "ends the document",
    "template": "markup of the chat template, and what it adds",
    "cut": "beyond the length that an example may have",
    "not shown": "left out of this page",
}
_TOKENS, _CHARACTERS = 1000, 100  # of each document, and of each token, that are kept with a prepared dataset
_FILE = "shown.json"


@dataclass(frozen=True)
class ShownToken:
    """`count`: how many of the model's tokens it is; those that share a character are shown as one."""

    text: str
    trained: bool
    reason: Reason
    count: int = 1


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens that are all trained or all not, for one reason."""

    reason: Reason
    trained: bool
    count: int
    tokens: tuple[str, ...]


@dataclass(frozen=True)
class Tally:
    """How many tokens of a reason there are, and how many of them are trained."""

    reason: Reason
    tokens: int
    trained: int


@dataclass(frozen=True)
class ShownDocument:
    """A document token by token. `tallies` are those of all its tokens.

    `name`: which one of a pair, or the label of an unpaired preference; otherwise empty.
    """

    name: str
    stretches: tuple[Stretch, ...]
    tallies: tuple[Tally, ...]

    @classmethod
    def of(cls, name: str, tokens: Sequence[ShownToken], *, bounded: bool = False) -> "ShownDocument":
        """`bounded`: with the first and the last of its tokens only, if it has many."""
        return cls(name, _stretches(_bounded(tokens) if bounded else tokens), _tallied(tokens))

    @property
    def tokens(self) -> int:
        return sum(tally.tokens for tally in self.tallies)

    @property
    def trained(self) -> int:
        return sum(tally.trained for tally in self.tallies)


@dataclass(frozen=True)
class ShownExample:
    """`turns`: the numbers of the messages that are trained. `outcome`: why it is not trained as a whole.

    `images`: the names of its images' files, each with its size if the file was there.
    """

    where: str  # file:line of its raw row
    turns: tuple[int, ...]
    outcome: str
    documents: tuple[ShownDocument, ...]
    images: tuple[str, ...] = ()


def heading(example: ShownExample, number: int, of: int) -> str:
    """Which example of a row it is, which messages of it are trained, its images, and what became of it."""
    parts = [f"example {number} of {of}"] if of > 1 else []
    if example.turns:
        trains = "trains message" if len(example.turns) == 1 else "trains messages"
        parts.append(f"{trains} {', '.join(map(str, example.turns))}")
    if example.images:
        parts.append(f"{'image' if len(example.images) == 1 else 'images'} {', '.join(example.images)}")
    return "; ".join([*parts, *([example.outcome] if example.outcome else [])])


def _tallied(tokens: Iterable[ShownToken]) -> tuple[Tally, ...]:
    """Counts of tokens by reason, in the order in which reasons are listed."""
    counts: Counter[Reason] = Counter()
    trained: Counter[Reason] = Counter()
    for token in tokens:
        counts[token.reason] += token.count
        trained[token.reason] += token.count * token.trained
    return tuple(Tally(reason, counts[reason], trained[reason]) for reason in MEANINGS if counts[reason])


def tallies(examples: Iterable[ShownExample]) -> tuple[Tally, ...]:
    """Counts of all tokens of several examples, one for each reason."""
    found = [tally for example in examples for document in example.documents for tally in document.tallies]
    return tuple(
        Tally(reason, sum(one.tokens for one in same), sum(one.trained for one in same))
        for reason in MEANINGS
        if (same := [one for one in found if one.reason == reason])
    )


def _bounded(tokens: Sequence[ShownToken]) -> list[ShownToken]:
    kept, half = list(tokens), _TOKENS // 2
    if len(tokens) > _TOKENS:
        missing = sum(token.count for token in tokens[half:-half])
        kept = [*tokens[:half], ShownToken("", False, "not shown", missing), *tokens[-half:]]
    return [replace(token, text=token.text[:_CHARACTERS]) for token in kept]


def _stretches(tokens: Sequence[ShownToken]) -> tuple[Stretch, ...]:
    found = []
    for (reason, trained), same in groupby(tokens, lambda token: (token.reason, token.trained)):
        listed = list(same)
        found.append(
            Stretch(reason, trained, sum(token.count for token in listed), tuple(token.text for token in listed))
        )
    return tuple(found)


def write(directory: Path, examples: Iterable[ShownExample]) -> None:
    """Write examples beside a prepared dataset."""
    text = json.dumps([asdict(one) for one in examples], ensure_ascii=False, separators=(",", ":"))
    publish.write_text(directory / _FILE, text + "\n")


def read(directory: Path) -> tuple[ShownExample, ...]:
    """The examples that were written; none where there is no such file, or it is damaged."""
    from pydantic import TypeAdapter  # noqa: PLC0415 - commands that read none start without it

    try:
        return TypeAdapter(tuple[ShownExample, ...]).validate_json((directory / _FILE).read_bytes())
    except (OSError, ValueError):
        return ()
