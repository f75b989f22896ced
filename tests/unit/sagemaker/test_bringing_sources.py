"""Sources of the machine that submits: training jobs get them below `cluster.root`, for stage download alone."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hyperpod_ft.cli.submitting import submit_and_follow
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch import submit
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import Selection
from hyperpod_ft.shipped import shipped
from tests.unit.sagemaker.training_jobs_in_memory import FSX, Jobs

EXAMPLES = shipped("examples") / "quickstart"


def test_sources_are_brought_once_a_download_passes_all_checks(
    make_run: Callable[..., Run], jobs: Jobs, tmp_path: Path
) -> None:
    model = shutil.copytree(EXAMPLES / "tiny-llama", tmp_path / "model")
    weights = (model / "model.safetensors").read_bytes()

    def submitted(only: str | None = None, **changes: object) -> Run:
        run = make_run(
            sagemaker=FSX,
            cluster__instance_type="c7i.4xlarge",
            model={"source": str(model)},
            dataset={"source": str(EXAMPLES / "qa.jsonl"), "format": "dolly"},
            parallelism={"ranks_per_node": 1},
            **changes,
        )
        submit_and_follow(run, Launchers(), "sagemaker", Selection(only=only), watch=False)
        return run

    with pytest.raises(UserError, match=r"generate\.prompts"):
        submitted(generate__prompts=[{"nothing": "of dolly"}])
    run = submitted("env")
    assert not run.paths.base_model.exists() and not run.paths.raw_datasets[0].exists()
    submit.cancel(run, Launchers())
    (model / "model.safetensors").write_bytes(weights[:-1])
    with pytest.raises(UserError, match=r"model\.source: the model is damaged"):
        submitted()
    (model / "model.safetensors").write_bytes(weights)
    run = submitted()
    assert (run.paths.base_model / "model.safetensors").read_bytes() == weights and run.paths.raw_datasets[0].exists()
