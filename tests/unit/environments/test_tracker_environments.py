"""The environments of trackers: made beside stage env, which does not wait for them for long, nor fail without them."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft import publish
from hyperpod_ft.environments import trackers
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.pins import requirements
from hyperpod_ft.runs.selection import Selection, choose, trackers_to_install
from tests.conftest import MakeRun
from tests.unit.stage_runs import finish

REPOSITORY = Path(__file__).resolve().parents[3]


def test_trackers_change_no_fingerprint(make_run: MakeRun) -> None:
    assert make_run(tracking={"trackers": ["wandb"], "project": "other"}).plan == make_run().plan


def test_an_environment_is_made_once_and_a_failure_does_not_stop_the_others(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []

    def build(pins: Path, environment: Path) -> None:
        built.append(pins.stem)
        if pins.stem == "wandb":
            raise UserError("pip install failed")
        (environment / "bin").mkdir(parents=True)
        (environment / "bin" / "python").touch()

    monkeypatch.setattr(trackers, "build", build)
    run = make_run(tracking={"trackers": ["wandb", "trackio"]})
    assert trackers.install_trackers(run) == {"wandb": "pip install failed"}
    assert trackers.install_trackers(run) == {"wandb": "pip install failed"}
    assert built == ["wandb", "trackio", "wandb"]
    assert trackers_to_install(run) == ["wandb"]


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_pins_name_the_version_of_the_extra(tracker: str) -> None:
    extra = re.search(rf'^{tracker} = \["(.+)"\]$', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    assert extra and extra[1] in requirements(tracker)


def test_mlflow_at_an_arn_has_the_plugin_that_signs_its_requests(make_run: MakeRun) -> None:
    arn = "arn:aws:sagemaker:us-west-2:123456789012:mlflow-tracking-server/ours"
    for address, pins in ((arn, "mlflow-sagemaker"), ("https://mlflow.example.com", "mlflow")):
        run = make_run(tracking={"trackers": ["mlflow"]}, cluster__environment={"MLFLOW_TRACKING_URI": address})
        assert run.paths.tracker_pins("mlflow") == pins
        assert run.paths.tracker_python("mlflow").parents[1].name.startswith(f"{pins}-")
    assert set(requirements("mlflow")) < set(requirements("mlflow-sagemaker"))


def test_stage_env_is_submitted_again_for_a_tracker_without_environment(make_run: MakeRun) -> None:
    def stages(**tracking: Any) -> list[str]:
        run = make_run(tracking=tracking)
        for stage in ("env", "download", "certify", "dataset"):
            finish(run, stage)
        assert run.journal.why_not_done("env") == ""
        return [stage.name for stage in choose(run)]

    assert "env" not in stages()
    assert stages(trackers=["wandb"])[0] == "env"
    assert "env" not in stages(trackers=["wandb"], python=sys.executable)
    run = make_run(tracking={"trackers": ["wandb"]})
    assert next(stage.name for stage in choose(run, Selection(start="train"))) == "train"


SLOW = """
import sys
import tomllib
from hyperpod_ft.stages import env
env._TRACKERS_SECONDS = 0.5
env.main()
"""


def test_training_waits_only_so_long_for_trackers(make_run: MakeRun) -> None:
    """Another process holds the lock of the environment, as one that installs it slowly."""
    run = make_run(tracking={"trackers": ["wandb"]})
    run.freeze()
    finish(run, "env")
    lock = run.paths.tracker_environment("wandb").with_name(f".{run.paths.tracker_environment('wandb').name}.lock")
    lock.parent.mkdir(parents=True)
    with publish.lock(lock):
        command = [sys.executable, "-c", SLOW, str(run.paths.directory)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "trackers are not installed within 0.5 s; the run continues without" in done.stdout
