"""One run file as Slurm jobs, in this process and as training jobs whose containers really run (containers.py)."""

import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hyperpod_ft.config.run_file import resolve, validate
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.localcluster import LocalCluster
from hyperpod_ft.runs.run import Run
from tests.aws import training_run
from tests.aws.training_command import Command
from tests.aws.training_run import Jobs, results, resumed_from
from tests.forking import ForkServer
from tests.training.conftest import fork_server, jobs_in  # noqa: F401 - a fixture
from tests.training.every_stage import perform
from tests.waiting import wait_for

if TYPE_CHECKING:
    from tests.aws.conftest import Aws

pytestmark = [pytest.mark.slurm, pytest.mark.training, pytest.mark.timeout(1200)]

STEPS = {"max_steps": 100, "save_every_steps": 12, "validate_every_steps": 8, "keep_best": True}


def values(root: Path, section: dict[str, Any]) -> dict[str, Any]:
    """Trains all parameters: with LoRA, `scripts/rehearse-sagemaker.sh` runs the same."""
    return training_run.fully_sharded(training_run.values(root, section, **STEPS))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Run:  # noqa: F811
    """The run without launcher and containers: its stages in this process, both ranks beside it."""
    root = tmp_path_factory.mktemp("undisturbed")
    run = Run.of(resolve(validate(values(root, {}), "run.yaml"), root))
    with jobs_in(tmp_path_factory.mktemp("jobs") / "jobs", fork_server) as jobs:
        return perform(run, jobs.train)


@pytest.fixture
def slurm(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """The variables with which this process, and what it starts, finds Slurm."""
    for name, value in cluster.environment().items():
        monkeypatch.setenv(name, value)
    return cluster.environment()


def cancel_after(command: Command, run: Run, steps: int) -> None:
    """Cancel the training once it has trained so many steps."""
    wait_for(
        lambda: run.paths.metrics_path.exists() and len(run.paths.metrics_path.read_text().splitlines()) > steps,
        600,
        every=0.05,  # it goes on meanwhile
    )
    assert "cancelled train" in command.run("cancel")
    wait_for(lambda: not Launchers().active(run), 600, every=0.5)
    assert not run.journal.is_done("train")


def test_from_training_jobs_to_slurm_and_back(
    slurm: Mapping[str, str], aws: "Aws", tmp_path: Path, undisturbed: Run
) -> None:
    """On one file system, by the commands of a user, who cancels the training twice.

    Containers may not create the next job, as in some accounts: `watch` does.
    """
    jobs = Jobs(aws, tmp_path / "fsx")
    jobs.deny("sagemaker:CreateTrainingJob")
    training_run.copy_shared(tmp_path / "fsx" / "ft", undisturbed.paths.root)
    command = Command(tmp_path, aws, values(tmp_path / "fsx" / "ft", jobs.section), slurm)
    output = command.run("submit", "run.yaml", "--launcher", "sagemaker")
    assert "Submitted quick/" in output
    assert "train quick-" in output
    assert "still at work" in command.run("submit", "run.yaml", "--launcher", "slurm", status=2)
    run = command.opened
    cancel_after(command, run, 6)
    command.run("resume", "--launcher", "slurm")
    cancel_after(command, run, len(run.paths.metrics_path.read_text().splitlines()))
    command.run("resume", "--launcher", "sagemaker")
    command.wait_until_ended()
    _, train = command.jobs()
    log = jobs.log(train)
    assert "sagemaker:CreateTrainingJob" in log
    assert "the next training job was not created; hyperpod-ft watch creates it" in log
    assert jobs.describe(train)["TrainingJobStatus"] == "Completed", "its own stages are done"
    assert "hyperpod-ft watch" in command.run("status")
    assert command.created() == ["train-1", "train-2"]
    assert "generate     done" in command.run("watch")
    assert command.created() == ["train-1", "train-2", "finish-2"]
    assert {stage["state"] for stage in command.status()["stages"]} == {"done"}
    assert "done" in command.run("list")
    assert "step 100/100" in command.run("logs", "train")
    for launcher in ("sagemaker", "process"):
        assert "Nothing to submit" in command.run("submit", "run.yaml", "--launcher", launcher)
    first, second = resumed_from(run)
    assert 6 <= first < second
    assert results(run) == results(undisturbed)


def test_interruptions_change_no_byte(aws: "Aws", tmp_path: Path, undisturbed: Run) -> None:
    """While it starts and while it trains: all instances gone at once, or SIGTERM with time to save.

    In a store: every host loses its files.
    """
    jobs, root = Jobs(aws), tmp_path / "client"
    training_run.copy_shared(root, undisturbed.paths.root)
    run = training_run.make(root, values(root, jobs.section))
    (train,) = jobs.names(run)
    lost = random.choice([0, random.randint(1, 25)])
    aws.scenario(interruptions={train: [("internal error", lost), ("spot", 26)]})
    jobs.wait_for_the_run(run)
    jobs.fetch(run)
    assert results(run) == results(undisturbed), lost
    described = jobs.describe(train)
    transitions = described["SecondaryStatusTransitions"]
    history = [transition["Status"] for transition in transitions]
    assert (history.count("Interrupted"), history.count("Restarting")) == (1, 1), (history, lost)
    left = re.findall(r"^(\d+) s of the job's time limit are left", jobs.log(train), re.MULTILINE)
    training = [each["StartTime"] for each in transitions if each["Status"] == "Training"]
    used = described["StoppingCondition"]["MaxRuntimeInSeconds"] - int(left[-1])
    assert used >= (training[-1] - training[0]).total_seconds() - 1, "all starts share one limit, which the last knows"
    assert jobs.names(run) == [train, train.replace("-train-", "-finish-")]
    saved = int(re.findall(r"stopped after step (\d+), which is saved", jobs.log(train))[-1])
    assert resumed_from(run)[-1] == saved, (resumed_from(run), saved)
    output = str(jobs.describe(train)["OutputDataConfig"]["S3OutputPath"]).partition(f"{jobs.bucket}/")[2]
    for job in jobs.names(run):
        left = aws.client("s3").list_objects_v2(Bucket=jobs.bucket, Prefix=f"{output}/{job}/")
        assert not left["KeyCount"], "nothing in /opt/ml/model, /opt/ml/output/data or /opt/ml/checkpoints"
