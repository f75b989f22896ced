"""One run file as Slurm jobs, plain processes and training jobs whose containers really run (containers.py)."""

import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.localcluster import LocalCluster
from hyperpod_ft.runs.run import Run
from tests.aws import training_run
from tests.aws.training_command import Command
from tests.aws.training_run import Jobs, results, resumed_from
from tests.waiting import wait_for

if TYPE_CHECKING:
    from tests.aws.conftest import Aws

pytestmark = [pytest.mark.slurm, pytest.mark.training, pytest.mark.timeout(1200)]

STEPS = {"max_steps": 60, "save_every_steps": 12}


@pytest.fixture(scope="module")
def by_process(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run by launcher `process`: both ranks on this machine, without containers."""
    run = training_run.make(tmp_path_factory.mktemp("by-process"), "process", **STEPS)
    wait_for(lambda: not Launchers().active(run), training_run.SECONDS, every=0.1)
    assert run.is_done("generate")
    return run


@pytest.fixture
def slurm(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """The variables with which this process, and what it starts, finds Slurm."""
    for name, value in cluster.environment().items():
        monkeypatch.setenv(name, value)
    return cluster.environment()


def test_begun_on_slurm_and_finished_as_training_jobs(
    slurm: Mapping[str, str], aws: "Aws", tmp_path: Path, by_process: Run
) -> None:
    """On one file system, by the commands of a user, who cancels the training on Slurm, and a training job."""
    Jobs(aws, tmp_path / "fsx")
    command = Command(tmp_path, aws, training_run.values(tmp_path / "fsx" / "ft", **STEPS), slurm)
    command.run("submit", "run.yaml", "--launcher", "slurm")
    run = command.opened
    wait_for(lambda: run.metrics_path.exists() and len(run.metrics_path.read_text().splitlines()) > 12, 600, every=0.5)
    assert "cancelled train" in command.run("cancel")
    wait_for(lambda: not Launchers().active(run), 600, every=0.5)
    assert not run.is_done("train")
    output = command.run("submit", "run.yaml", "--launcher", "sagemaker")
    assert "Submitted quick/" in output
    assert "train quick-" in output
    assert "still at work" in command.run("submit", "run.yaml", "--launcher", "sagemaker", status=2)
    assert "cancelled train" in command.run("cancel")
    command.wait_until_ended()
    assert "cancelled" in {stage["state"] for stage in command.status()["stages"]}
    output = command.run("resume", "--watch")
    assert "generate     done" in output
    assert command.created() == ["train-1", "train-2", "finish-2"]
    assert {stage["state"] for stage in command.status()["stages"]} == {"done"}
    assert "done" in command.run("list")
    assert "step 60/60" in command.run("logs", "train")
    for launcher in ("sagemaker", "process"):
        assert "Nothing to submit" in command.run("submit", "run.yaml", "--launcher", launcher)
    assert resumed_from(run)
    assert results(run) == results(by_process)


def test_interruptions_change_no_byte(aws: "Aws", tmp_path: Path, by_process: Run) -> None:
    """While it starts and while it trains: all instances gone at once, or SIGTERM with time to save.

    In a store: every host loses its files.
    """
    jobs = Jobs(aws, tmp_path / "fsx")
    run = training_run.make(tmp_path / "client", shared=by_process.root, **STEPS)
    (train,) = jobs.names(run)
    lost = random.choice([0, random.randint(1, 25)])
    aws.scenario(interruptions={train: [("internal error", lost), ("spot", 26)]})
    jobs.wait_for_the_run(run)
    jobs.fetch(run)
    assert results(run) == results(by_process), lost
    history = [transition["Status"] for transition in jobs.describe(train)["SecondaryStatusTransitions"]]
    assert (history.count("Interrupted"), history.count("Restarting")) == (1, 1), (history, lost)
    assert jobs.names(run) == [train, train.replace("-train-", "-finish-")]
    saved = int(re.findall(r"stopped after step (\d+), which is saved", jobs.log(train))[-1])
    assert resumed_from(run)[-1] == saved, (resumed_from(run), saved)
    output = str(jobs.describe(train)["OutputDataConfig"]["S3OutputPath"]).partition(f"{training_run.BUCKET}/")[2]
    for job in jobs.names(run):
        left = aws.client("s3").list_objects_v2(Bucket=training_run.BUCKET, Prefix=f"{output}/{job}/")
        assert not left["KeyCount"], "nothing in /opt/ml/model, /opt/ml/output/data or /opt/ml/checkpoints"
