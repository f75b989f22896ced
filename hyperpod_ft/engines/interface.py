"""What an engine offers, and what its training leaves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hyperpod_ft.engines.processes import Processes
    from hyperpod_ft.runs.run import Run


@dataclass(frozen=True)
class Trained:
    """What a finished training left: the final sharded checkpoint, and facts for the stage's record."""

    checkpoint: Path
    facts: dict[str, Any]


class Engine(Protocol):
    """What every engine's module offers."""

    def train(self, run: Run, processes: Processes) -> Trained:
        """Train the run to its last step on all `processes`, from its newest complete checkpoint if there is one.

        Called on every rank. Raises UserError for what a user can mend, `interruption.Interrupted` after a signal.
        """

    def precompile(self, run: Run, processes: Processes) -> dict[str, Any]:
        """Trace the graphs of training: a few steps, whose results mean nothing, leaving no file of its own.

        Only of engines that compile ahead (neuron). Takes `config.neuron.precompile_steps` steps, writes below
        `run.trial` if it has to, and gives facts for the record of stage precompile. Called on every rank.
        """
