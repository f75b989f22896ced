"""How many sampled rows both models answered exactly: a result of stage generate, in its record."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExactCount:
    """How many of a split's sampled rows each model answered exactly."""

    rows: int
    base: int
    tuned: int

    def line(self, split: str) -> str:
        """For example `exact answers, train rows: base 1/8, tuned 6/8`."""
        return f"exact answers, {split} rows: base {self.base}/{self.rows}, tuned {self.tuned}/{self.rows}"
