"""How training runs: one engine per software stack, behind one function.

Importing this package imports no torch; an engine's module is imported when it is asked for.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from hyperpod_ft.errors import UserError
from hyperpod_ft.run import Run

if TYPE_CHECKING:
    from hyperpod_ft.engines.processes import Processes

_MODULES = {"torch": "hyperpod_ft.engines.torch"}


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


def can_train(name: str) -> bool:
    """Whether this version can train with the engine."""
    return name in _MODULES


def require_engine(name: str) -> None:
    """Raise UserError when this version cannot train with the engine."""
    if not can_train(name):
        raise UserError(
            f"engine: this version of hyperpod-ft plans and renders {name} runs, but cannot train them yet",
            "use `plan` and `render`, or engine: torch",
        )


def engine(name: str) -> Engine:
    """The engine of that name. Raises UserError when this version has none."""
    require_engine(name)
    return cast(Engine, importlib.import_module(_MODULES[name]))
