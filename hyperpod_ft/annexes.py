"""Optional packages of this kit; a run file becomes a trained model without them.

Each is a package of this kit with a module `annex`, whose `ANNEX` says what the room adds. Nothing else of an annex is
imported from outside it. Delete its folder and its name in `NAMES`, and only the room's commands and launchers
disappear.
"""

from __future__ import annotations  # the types below are not imported: this stays light

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    import typer

    from hyperpod_ft.launch.interface import Launcher
    from hyperpod_ft.runs.jobs import Job
    from hyperpod_ft.runs.run import Run

NAMES = ("localcluster", "cluster", "sagemaker", "serving", "first_day")


class Commands(NamedTuple):
    """Commands of an annex. Without a name they stand beside the others, otherwise below it."""

    app: typer.Typer
    name: str | None = None
    help: str | None = None


class Annex:
    """What a room may add. An annex overrides what it has, and imports it only then: `--help` asks for all commands."""

    def commands(self) -> Sequence[Commands]:
        return ()

    def launchers(self) -> Sequence[Launcher]:
        return ()

    def other_jobs(self, run: Run) -> Sequence[Job]:
        """Active jobs that use the run's files but are not its stages. Raises UserError without an answer."""
        return ()

    def slurm_conf(self, cluster: str) -> Path | None:
        """The slurm.conf of this user's own Slurm of that name, or of the default one (empty); None if it is not up."""
        return None

    def slurm_name(self, conf: str) -> str:
        """The name of the user's own Slurm with this slurm.conf; empty for any other."""
        return ""


@cache
def annexes() -> tuple[Annex, ...]:
    """All annexes of this kit."""
    return tuple(import_module(f"hyperpod_ft.{name}.annex").ANNEX for name in NAMES)


def slurm_conf(cluster: str) -> Path | None:
    """As `Annex.slurm_conf`."""
    return next(filter(None, (annex.slurm_conf(cluster) for annex in annexes())), None)


def launchers() -> tuple[Launcher, ...]:
    """The launchers that annexes add."""
    return tuple(launcher for annex in annexes() for launcher in annex.launchers())
