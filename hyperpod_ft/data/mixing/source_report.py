"""What became of each of several sources: what an epoch has of it, repeats, left out, and duplicates."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError


@dataclass(frozen=True)
class SourceReport:
    """What became of one source."""

    name: str
    rows_read: int
    rows_used: int
    bad_rows: int
    duplicates: int  # examples that others have the same text as, and that were removed
    examples: int  # for training
    train_examples: int  # in an epoch
    train_tokens: int
    validation_examples: int
    validation_rows: int  # packed, which have no examples of other sources

    @property
    def repeated(self) -> int:
        """How many of an epoch's examples are there again."""
        return max(0, self.train_examples - self.examples)

    @property
    def left_out(self) -> int:
        return max(0, self.examples - self.train_examples)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"repeated": self.repeated, "left_out": self.left_out}

    def described(self, epoch: int) -> str:
        """In one line; `epoch`: the examples of all sources in an epoch."""
        parts = ["no training examples"]
        if self.examples:
            parts = [f"{self.train_examples:,} training examples, {self.train_examples / epoch:.1%} of an epoch"]
        if self.repeated:
            parts[0] += f", {self.repeated:,} of them repeats"
        if self.left_out:
            parts[0] += f"; {self.left_out:,} of {self.examples:,} are left out"
        if self.validation_examples:
            parts.append(f"{self.validation_examples:,} validation")
        if self.duplicates:
            parts.append(f"{self.duplicates:,} duplicates removed")
        if self.bad_rows:
            parts.append(f"{self.bad_rows:,} bad rows")
        return "; ".join(parts)


def read(report: Mapping[str, Any]) -> tuple[SourceReport, ...]:
    """Those of a report.json; none if they are damaged, or the dataset has one source."""
    try:
        return _SOURCES.validate_python(report.get("sources", ()))
    except ValidationError:
        return ()


_SOURCES = TypeAdapter(tuple[SourceReport, ...])
