"""The interface of an engine, and the result of its training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hyperpod_ft.engines.ranks import Ranks
    from hyperpod_ft.runs.run import Run


@dataclass(frozen=True)
class TrainingResult:
    """The result of a finished training: the final sharded checkpoint, and facts for the stage's record."""

    checkpoint: Path
    facts: dict[str, Any]


class Engine(Protocol):
    """The functions of every engine's module."""

    def train(self, run: Run, ranks: Ranks) -> TrainingResult:
        """Train the run to its last step on all `ranks`, from its newest complete checkpoint if there is one.

        Called on every rank. Raises UserError for what a user can correct, `interruption.Interrupted` after a signal.
        """

    def precompile(self, run: Run, ranks: Ranks) -> dict[str, Any]:
        """Run what training runs, in a few steps whose results are discarded, so that it is compiled.

        Called on every rank where the engine's rules have stage precompile. May write to `run.trial`. Returns facts for
        the stage's record.
        """
