"""What SageMaker adds to the kit: a launcher of training jobs, endpoints, and their sections of the run file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hyperpod_ft.annexes import Annex, Commands

if TYPE_CHECKING:
    from pathlib import Path

    from hyperpod_ft.config.fields import Section
    from hyperpod_ft.config.run_config import RunConfig
    from hyperpod_ft.launch.preflight import JobPreview
    from hyperpod_ft.launch.protocol import Launcher
    from hyperpod_ft.planning.plan import StagePlan
    from hyperpod_ft.runs.run import Run


class SageMakerAnnex(Annex):
    def sections(self) -> Mapping[str, type[Section]]:
        from hyperpod_ft.sagemaker.endpoint.section import Deploy
        from hyperpod_ft.sagemaker.section import SageMaker

        return {"sagemaker": SageMaker, "deploy": Deploy}

    def commands(self) -> Sequence[Commands]:
        from hyperpod_ft.sagemaker.cli.deploy import app as deploy_app
        from hyperpod_ft.sagemaker.cli.setup import app as sagemaker_app

        return [
            Commands(sagemaker_app, "sagemaker", "What SageMaker training jobs need: a role, a bucket, quotas."),
            Commands(deploy_app, "deploy", "A SageMaker endpoint for the tuned model. `deploy RUN` creates it."),
        ]

    def check(self, config: RunConfig) -> None:
        from hyperpod_ft.sagemaker.endpoint import section

        section.check(config)

    def launchers(self) -> Sequence[Launcher]:
        from hyperpod_ft.sagemaker.launcher import SageMakerLauncher

        return [SageMakerLauncher()]

    def previews(self, run: Run, stages: Sequence[StagePlan]) -> Sequence[JobPreview]:
        from hyperpod_ft.sagemaker.section import section_of
        from hyperpod_ft.sagemaker.training_request import previews

        return [*previews(run, stages)] if section_of(run.config) else []

    def has_own_python(self, config: RunConfig) -> bool:
        from hyperpod_ft.sagemaker.section import section_of

        return section_of(config) is not None

    def location(self, run: Run, path: Path) -> str:
        from hyperpod_ft.runs.jobs import SAGEMAKER
        from hyperpod_ft.sagemaker.section import store_of, store_url

        in_store = store_of(run.config) and run.journal.last_launcher == SAGEMAKER and not path.exists()
        return store_url(run, path) if in_store else ""

    def bring(self, run: Run, directories: Sequence[Path]) -> None:
        from hyperpod_ft.sagemaker.store import sync

        sync.pull_models(run, directories)


ANNEX = SageMakerAnnex()
