"""The client of SageMaker's training jobs: its answers in Slurm's words, and its errors. botocore's Stubber stands in
for SageMaker: it checks requests by the service's model."""

from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import pytest
from botocore.stub import Stubber

from hyperpod_ft.errors import UserError
from hyperpod_ft.sagemaker.training_jobs import TrainingJobs, job_state, seconds_used

BEGAN = datetime(2026, 1, 1, 10, 0, tzinfo=timezone.utc)
ARN = "arn:aws:sagemaker:us-west-2:123456789012:training-job/x"


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> TrainingJobs:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    return TrainingJobs("us-west-2")


@pytest.fixture
def service(jobs: TrainingJobs) -> Iterator[Stubber]:
    with Stubber(jobs.session.client("sagemaker")) as stubber:
        yield stubber
        stubber.assert_no_pending_responses()


@pytest.mark.parametrize(
    ("status", "secondary", "expected"),
    [
        ("InProgress", "Pending", "PENDING"),
        ("InProgress", "Starting", "PENDING"),
        ("InProgress", "Interrupted", "PENDING"),
        ("InProgress", "Downloading", "RUNNING"),
        ("InProgress", "Training", "RUNNING"),
        ("InProgress", "Uploading", "RUNNING"),
        ("InProgress", "Restarting", "RUNNING"),
        ("Stopping", "Stopping", "COMPLETING"),
        ("Stopped", "Stopped", "CANCELLED"),
        ("Stopped", "MaxRuntimeExceeded", "TIMEOUT"),
        ("Stopped", "MaxWaitTimeExceeded", "DEADLINE"),
        ("Completed", "Completed", "COMPLETED"),
        ("Failed", "Failed", "FAILED"),
        ("Deleting", "Deleting", "COMPLETING"),
    ],
)
def test_states_are_slurms(status: str, secondary: str, expected: str) -> None:
    state = job_state({"TrainingJobStatus": status, "SecondaryStatus": secondary})
    assert state.state == expected
    assert state.active == (status in ("InProgress", "Stopping", "Deleting"))


def test_reason_elapsed_and_nodes() -> None:
    described: dict[str, Any] = {
        "TrainingJobStatus": "InProgress",
        "SecondaryStatus": "Pending",
        "SecondaryStatusTransitions": [{"StatusMessage": "old"}, {"StatusMessage": "Insufficient capacity, waiting"}],
        "ResourceConfig": {"InstanceType": "ml.p4d.24xlarge", "InstanceCount": 2},
    }
    state = job_state(described)
    assert (state.reason, state.elapsed, state.nodes) == ("Insufficient capacity, waiting", "", "2 x ml.p4d.24xlarge")
    resources = {"InstancePreferences": [{"InstanceType": "ml.a"}, {"InstanceType": "ml.b"}], "InstanceCount": 2}
    assert job_state(described | {"ResourceConfig": resources}).nodes == "2 x ml.a or ml.b"
    assert job_state(described | {"ResourceConfig": resources | {"SelectedInstanceType": "ml.b"}}).nodes == "2 x ml.b"
    running = described | {"SecondaryStatus": "Training", "TrainingStartTime": BEGAN}
    assert job_state(running, BEGAN.replace(day=3, hour=11, second=7)).elapsed == "2-01:00:07"
    failed = {
        "TrainingJobStatus": "Failed",
        "FailureReason": "AlgorithmError:\n exit code 2",
        "TrainingStartTime": BEGAN,
    }
    ended = job_state(failed | {"TrainingEndTime": BEGAN.replace(minute=2)})
    assert (ended.reason, ended.elapsed) == ("AlgorithmError: exit code 2", "00:02:00")


def test_the_time_that_a_job_waits_for_instances_is_not_of_its_limit() -> None:
    times = [BEGAN.replace(minute=minute) for minute in (0, 5, 7, 20, 40, 42)]
    states = ["Starting", "Downloading", "Training", "Interrupted", "Downloading"]
    transitions: list[dict[str, Any]] = [
        {"Status": status, "StartTime": begin, "EndTime": end}
        for status, begin, end in zip(states, times, times[1:], strict=False)
    ]
    transitions.append({"Status": "Training", "StartTime": times[-1]})
    described = {"SecondaryStatusTransitions": transitions}
    assert seconds_used(described, BEGAN.replace(minute=45)) == (2 + 13 + 2 + 3) * 60
    assert seconds_used({}) == 0


def test_a_name_in_use_is_no_second_job(jobs: TrainingJobs, service: Stubber) -> None:
    request = {"TrainingJobName": "x", "RoleArn": ARN, "OutputDataConfig": {"S3OutputPath": "s3://bucket"}}
    service.add_response("create_training_job", {"TrainingJobArn": ARN}, request)
    service.add_client_error("create_training_job", "ResourceInUse", "Training job names must be unique")
    assert [jobs.create(request), jobs.create(request)] == [True, False]


def test_a_quota_is_named(jobs: TrainingJobs, service: Stubber) -> None:
    message = "The account-level service limit 'ml.p4d.24xlarge for training job usage' is 0 Instances"
    service.add_client_error("create_training_job", "ResourceLimitExceeded", message)
    with pytest.raises(UserError, match=r"training job x: .*ResourceLimitExceeded.*ml\.p4d\.24xlarge for training job"):
        jobs.create({"TrainingJobName": "x", "RoleArn": ARN, "OutputDataConfig": {"S3OutputPath": "s3://bucket"}})


def test_stopping_a_job_that_has_ended_is_no_error(jobs: TrainingJobs, service: Stubber) -> None:
    ended = "The request was rejected because the training job is in status Completed."
    service.add_client_error("stop_training_job", "ValidationException", ended)
    jobs.stop("x")
    service.add_client_error("stop_training_job", "AccessDeniedException", "no")
    with pytest.raises(UserError, match="access denied"):
        jobs.stop("x")
