"""How training runs: one engine per software stack, behind one function.

Importing this package imports no torch; an engine's module is imported when it is asked for.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from hyperpod_ft.runs.run import Run

if TYPE_CHECKING:
    from hyperpod_ft.engines.processes import Processes


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


def engine(name: Literal["torch", "neuron"]) -> Engine:
    """The engine of that name."""
    return cast(Engine, importlib.import_module(f"hyperpod_ft.engines.{name}"))
