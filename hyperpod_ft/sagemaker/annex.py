"""What SageMaker adds to the kit: a launcher of training jobs, and endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hyperpod_ft.annexes import Annex, Commands

if TYPE_CHECKING:
    from hyperpod_ft.launch.interface import Launcher


class SageMakerAnnex(Annex):
    def commands(self) -> Sequence[Commands]:
        from hyperpod_ft.sagemaker.cli.deploy import app as deploy_app
        from hyperpod_ft.sagemaker.cli.setup import app as sagemaker_app

        return [
            Commands(sagemaker_app, "sagemaker", "What SageMaker training jobs need: a role, a bucket, quotas."),
            Commands(deploy_app, "deploy", "A SageMaker endpoint for the tuned model. `deploy RUN` creates it."),
        ]

    def launchers(self) -> Sequence[Launcher]:
        from hyperpod_ft.sagemaker.launcher import SageMakerLauncher

        return [SageMakerLauncher()]


ANNEX = SageMakerAnnex()
