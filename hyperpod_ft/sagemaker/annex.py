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
    from hyperpod_ft.sagemaker.endpoint.section import Deploy


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
        from hyperpod_ft.sagemaker.endpoint.section import deploy_of
        from hyperpod_ft.sagemaker.section import section_of, store_of

        if section_of(config) and config.eval:
            raise ValueError("eval: SageMaker training jobs do not evaluate; remove section eval or section sagemaker")
        if config.engine == "neuron" and store_of(config) and config.cluster.nodes > 1:
            raise ValueError(
                "sagemaker.store: with engine neuron, several nodes write their checkpoints to one shared volume; set"
                " sagemaker.file_system instead"
            )
        if deploy := deploy_of(config):
            _check_endpoint(config, deploy)

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


def _check_endpoint(config: RunConfig, deploy: Deploy) -> None:
    """What no endpoint will serve is refused before the training."""
    from hyperpod_ft.planning.lora import MAX_LORA_RANK

    if config.dataset.max_target_length is not None:
        raise ValueError(
            "deploy: vLLM does not serve encoder-decoders; remove the section, and serve the tuned model with"
            " `hyperpod-ft serve`"
        )
    if deploy.model == "merged":
        return
    if config.training.method != "lora":
        raise ValueError("deploy.model: training.method full makes no adapter; set it to merged")
    if config.lora.dora:
        raise ValueError("deploy.model: vLLM does not serve DoRA adapters with a base model; set it to merged")
    if config.lora.r > MAX_LORA_RANK:
        raise ValueError(f"deploy.model: vLLM serves adapters of rank {MAX_LORA_RANK} or less; set it to merged")


ANNEX = SageMakerAnnex()
