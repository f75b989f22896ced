"""The kit's client of SageMaker's training jobs: only here are they created, described, listed and stopped.

States are given in Slurm's words, as every launcher does.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from typing import Any

from hyperpod_ft.aws.session import Session, answer_or_none, explained, paged
from hyperpod_ft.launch.interface import JobState

# Slurm's words for TrainingJobStatus; a secondary status below says more.
_STATES = {
    "InProgress": "RUNNING",
    "Completed": "COMPLETED",
    "Failed": "FAILED",
    "Stopping": "COMPLETING",
    "Stopped": "CANCELLED",
    "Deleting": "COMPLETING",
}
_SECONDARY_STATES = {
    **dict.fromkeys(("Starting", "Pending", "LaunchingMLInstances", "PreparingTrainingStack"), "PENDING"),
    # after a spot interruption the same job waits for other instances
    **dict.fromkeys(("Interrupted",), "PENDING"),
    "MaxRuntimeExceeded": "TIMEOUT",
    "MaxWaitTimeExceeded": "DEADLINE",
}
_MISSING = ("ResourceNotFound", "ValidationException")  # DescribeTrainingJob: "Requested resource not found."


@dataclass(frozen=True)
class TrainingJob:
    """What SageMaker says about a training job."""

    name: str
    state: JobState
    began: bool  # its containers were started at least once
    hyperparameters: Mapping[str, str]


@dataclass(frozen=True)
class TrainingJobs:
    """The training jobs of an account in one region. Methods raise UserError."""

    region: str

    @cached_property
    def session(self) -> Session:
        return Session(self.region)

    def create(self, request: Mapping[str, Any]) -> bool:
        """Create a job; False if its name is in use: names are unique, so that no job is created twice."""
        with self._explained(request["TrainingJobName"]):
            return answer_or_none(self._client.create_training_job, "ResourceInUse", **request) is not None

    def find(self, name: str) -> TrainingJob | None:
        """A job; None if there is none of this name."""
        with self._explained(name):
            describe = self._client.describe_training_job
            found = answer_or_none(describe, *_MISSING, saying="(?i)not found", TrainingJobName=name)
        if found is None:
            return None
        return TrainingJob(name, job_state(found), "TrainingStartTime" in found, found.get("HyperParameters", {}))

    def seconds_used(self, name: str) -> float:
        """How much of its MaxRuntimeInSeconds a job has used, in all of its attempts together."""
        with self._explained(name):
            return seconds_used(self._client.describe_training_job(TrainingJobName=name))

    def names(self, prefix: str) -> list[str]:
        """The names of all jobs that begin like this, in alphabetical order."""
        with self._explained(prefix):
            found = paged(self._client, "list_training_jobs", "TrainingJobSummaries", NameContains=prefix)
            return sorted(one["TrainingJobName"] for one in found if one["TrainingJobName"].startswith(prefix))

    def stop(self, name: str) -> None:
        """Ask a job to end: its containers get SIGTERM and two minutes. Succeeds if it has ended."""
        with self._explained(name):
            # "The request was rejected because the training job is in status Completed."
            stop = self._client.stop_training_job
            answer_or_none(stop, "ValidationException", saying="(?i)status", TrainingJobName=name)

    @property
    def _client(self) -> Any:
        return self.session.client("sagemaker")

    def _explained(self, name: str) -> AbstractContextManager[None]:
        return explained(f"training job {name}")


def job_state(described: Mapping[str, Any], now: datetime | None = None) -> JobState:
    """The state of a job from DescribeTrainingJob's answer. `now`: for the time that a running one has taken."""
    secondary = described.get("SecondaryStatus", "")
    status = described["TrainingJobStatus"]
    state = _SECONDARY_STATES.get(secondary, "") if status in ("InProgress", "Stopped") else ""
    resources = described.get("ResourceConfig", {})
    return JobState(
        state=state or _STATES.get(status, "RUNNING"),
        reason=_reason(described),
        elapsed=_elapsed(described, now or datetime.now(timezone.utc)),
        nodes=f"{resources.get('InstanceCount', 1)} x {_types(resources)}",
    )


def _types(resources: Mapping[str, Any]) -> str:
    """The instance type, or those that SageMaker has yet to choose from."""
    chosen = resources.get("SelectedInstanceType") or resources.get("InstanceType")
    return chosen or " or ".join(one["InstanceType"] for one in resources.get("InstancePreferences", []))


def seconds_used(described: Mapping[str, Any], now: datetime | None = None) -> float:
    """Of a job's limit, from DescribeTrainingJob's answer: all but the time that it has waited for instances."""
    now = now or datetime.now(timezone.utc)
    transitions = described.get("SecondaryStatusTransitions", ())
    busy = [found for found in transitions if _SECONDARY_STATES.get(found["Status"]) != "PENDING"]
    return float(sum(((found.get("EndTime") or now) - found["StartTime"]).total_seconds() for found in busy))


def _reason(described: Mapping[str, Any]) -> str:
    """Why it failed, or what it is waiting for or doing."""
    if described.get("FailureReason"):
        return " ".join(str(described["FailureReason"]).split())
    transitions = described.get("SecondaryStatusTransitions") or [{}]
    return str(transitions[-1].get("StatusMessage") or described.get("SecondaryStatus", ""))


def _elapsed(described: Mapping[str, Any], now: datetime) -> str:
    """The elapsed time as Slurm writes it: [days-]hours:minutes:seconds; empty before the containers started."""
    began = described.get("TrainingStartTime")
    if began is None:
        return ""
    seconds = max(0, int(((described.get("TrainingEndTime") or now) - began).total_seconds()))
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{f'{days}-' if days else ''}{hour:02d}:{minute:02d}:{second:02d}"
