"""What serving adds to the kit: its commands, and jobs that serve a run's models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hyperpod_ft.annexes import Annex, Commands

if TYPE_CHECKING:
    from hyperpod_ft.runs.jobs import Job
    from hyperpod_ft.runs.run import Run


class ServingAnnex(Annex):
    def commands(self) -> Sequence[Commands]:
        from hyperpod_ft.serving.cli import app

        return [Commands(app)]

    def other_jobs(self, run: Run) -> Sequence[Job]:
        from hyperpod_ft.launch.slurm.launcher import slurm_of
        from hyperpod_ft.serving import node_job

        return node_job.active(run, slurm_of(run)) if run.paths.serving.is_dir() else ()


ANNEX = ServingAnnex()
