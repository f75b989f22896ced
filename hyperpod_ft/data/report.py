"""What a prepared dataset consists of, for report.json, the record and the log."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hyperpod_ft.data.inspection.shown import Tally
from hyperpod_ft.data.mixing.source_report import SourceReport
from hyperpod_ft.errors import printable

_LENGTH_BINS = 40
_MOSTLY = 0.5  # of all positions


@dataclass(frozen=True)
class Lengths:
    """How long the documents of both splits are, in tokens after truncation.

    `counts[i]` of them have at least `bin_width * i` and fewer than `bin_width * (i + 1)` tokens.
    """

    median: float
    mean: float
    longest: int
    bin_width: int
    counts: tuple[int, ...]

    @classmethod
    def of(cls, found: Mapping[int, int]) -> "Lengths":
        """`found`: how many documents have each length, at least one."""
        lengths, counts = np.array(sorted(found.items()), np.int64).T
        ends, longest = counts.cumsum(), int(lengths[-1])
        middle = np.searchsorted(ends, [(ends[-1] - 1) // 2, ends[-1] // 2], side="right")
        width = longest // _LENGTH_BINS + 1
        bins = np.zeros(longest // width + 1, np.int64)
        np.add.at(bins, lengths // width, counts)
        return cls(
            median=float(lengths[middle].mean()),
            mean=round(int((lengths * counts).sum()) / int(ends[-1]), 2),
            longest=longest,
            bin_width=width,
            counts=tuple(bins.tolist()),
        )


@dataclass(frozen=True)
class EndOfTurn:
    """A token that ends `turns` trained turns; `stops`: the base model's files name it as one that ends an answer."""

    token: int
    text: str
    turns: int
    stops: bool


@dataclass(frozen=True)
class ChatReport:
    """Of conversations. `compared`: whose contexts were compared with what a server would read, and are the same."""

    turns: int
    unrolled: int  # conversations that are several examples
    left_out: int  # examples of conversations whose other examples are used
    loses_reasoning: int  # turns whose reasoning the chat template does not write
    ends: tuple[EndOfTurn, ...]
    compared_examples: int
    compared_turns: int
    compared_tokens: tuple[Tally, ...]  # of these examples, by reason

    def lines(self) -> Iterator[str]:
        yield (
            f"conversations: {self.turns:,} trained turns; {self.unrolled:,} conversations are several examples, since"
            " the chat template rewrites earlier turns"
        )
        yield (
            f"contexts: of {self.compared_turns:,} turns in {self.compared_examples:,} sampled examples, each is what a"
            " server reads, token by token"
        )
        by_reason = ", ".join(f"{one.reason} {one.tokens:,} ({one.trained:,} trained)" for one in self.compared_tokens)
        yield f"tokens of these examples: {by_reason}"
        if self.left_out:
            yield f"examples left out of conversations that are used: {self.left_out:,}"
        if self.loses_reasoning:
            yield (
                f"reasoning left out: of {self.loses_reasoning:,} turns, since the chat template does not write it; to"
                " train it, write it into the content"
            )
        for end in self.ends:
            if not end.stops:
                yield (
                    f"end of turn {printable(end.text)} ({end.turns:,} turns): the base model does not stop there; the"
                    " tuned model's generation_config.json will name it"
                )


@dataclass(frozen=True)
class DatasetReport:
    """Tokens are those of both splits without padding; label tokens are those that count in the loss.

    For an encoder-decoder, label tokens are the targets', and the first padding share is that of the sources.
    """

    rows_read: int  # raw rows
    rows_used: int
    train_examples: int
    validation_examples: int
    tokens: int
    label_tokens: int
    train_rows: int  # packed, max_length tokens each
    validation_rows: int
    padding_share: float  # of all positions of both splits
    target_padding_share: float | None  # of the decoder's positions; None: the model has no encoder
    unknown_tokens: int  # that stand for text for which the tokenizer has none
    unknown_in: int  # examples
    unused_columns: tuple[str, ...]
    truncated: int
    # Longer than max_length: with overlong drop, bad rows; with truncate, examples whose prompt fills the row.
    dropped: int
    bad_rows: int
    bad_reasons: dict[str, int]
    bad_listed: tuple[str, ...]
    lengths: Lengths
    # validation examples whose text is in the training data too; None: not compared, those with images
    validation_in_training: int | None
    # empty where every example of one source is in an epoch once
    sources: tuple[SourceReport, ...] = ()
    chats: ChatReport | None = None  # sources of format chat
    images: int = 0  # different ones
    desirable_examples: int | None = None  # of the training examples; None: they have no labels

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self)
        if not self.images:
            del values["images"]
        if self.desirable_examples is None:
            del values["desirable_examples"]
        if not self.sources:
            del values["sources"], values["validation_in_training"]
            return values
        return values | {"sources": [source.as_dict() for source in self.sources]}

    def lines(self) -> Iterator[str]:
        """The report as lines of the log."""
        yield f"raw rows: {self.rows_read:,} read, {self.rows_used:,} used, {self.bad_rows:,} bad"
        for reason, count in self.bad_reasons.items():
            yield f"  bad: {count:,} x {reason}"
        for listed in self.bad_listed:
            yield f"  bad: {listed}"
        if self.unused_columns:
            yield f"columns not used: {printable(', '.join(self.unused_columns))}"
        yield f"examples: {self.train_examples:,} train, {self.validation_examples:,} validation"
        if self.desirable_examples is not None:
            others = self.train_examples - self.desirable_examples
            yield f"labels of the training examples: {self.desirable_examples:,} desirable, {others:,} undesirable"
        for source in self.sources:
            yield f"  {source.name}: {source.described(self.train_examples)}"
        if self.validation_in_training:
            yield (
                f"warning: {self.validation_in_training:,} of {self.validation_examples:,} validation examples are in"
                " the training data too; dataset.deduplicate removes them from it"
            )
        yield (
            f"tokens: {self.tokens:,}, loss on {self.label_tokens:,} ({self.label_tokens / self.tokens:.1%});"
            f" examples truncated: {self.truncated:,}, dropped as too long: {self.dropped:,}"
        )
        if self.images:
            yield f"images: {self.images:,}, which are part of these tokens"
        if self.chats:
            yield from self.chats.lines()
        if self.unknown_tokens:
            yield (
                f"unknown tokens: {self.unknown_tokens:,}, in {self.unknown_in:,} examples: the tokenizer has no token"
                " for some of their characters"
            )
        targets = self.target_padding_share
        padding = f"{self.padding_share:.2%}" if targets is None else f"{self.padding_share:.2%} of sources"
        if targets is not None:
            padding += f", {targets:.2%} of targets"
        yield f"packed rows: {self.train_rows:,} train, {self.validation_rows:,} validation; padding {padding}"
        # prompts, which have no labels, and rows with images are not trained with this padding
        if self.padding_share > _MOSTLY and targets is None and self.label_tokens and not self.images:
            yield (
                "warning: rows are mostly padding, which takes as much time as text: the longest document has"
                f" {self.lengths.longest:,} tokens; lower dataset.max_length"
            )
