"""SageMaker training jobs that really run: their life, from starting over training to whatever ends them.

    Starting -> Downloading -> Training -> Uploading -> Completed | Failed | Stopped | MaxRuntimeExceeded
                    ^             |
                    +- Interrupted (spot), Restarting (an error of SageMaker's own, with RetryStrategy)

The containers are real processes (containers.py); what surrounds them takes milliseconds instead of minutes. Sources:
SageMaker's developer guide (training algorithm containers, managed spot training, stopping), and messages that users
quote. The times of StoppingCondition are not scaled; the 120 s between SIGTERM and SIGKILL are scenario.py's.
"""

import math
import re
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Generator
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from moto.s3.models import s3_backends

from hyperpod_ft.digests import files_below
from tests.aws.clock import Process
from tests.aws.containers import Container
from tests.aws.role_access import may, types_of
from tests.aws.wire import AwsError
from tests.aws.world import ACCOUNT, Region

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
ENDED = ("Completed", "Failed", "Stopped")
_MESSAGES = {
    "Starting": "Preparing the instances for training",
    "Downloading": "Downloading the training image and input data",
    "Training": "Training image download completed. Training in progress.",
    "Interrupted": "Training job interrupted because of a Spot interruption",
    "Restarting": "Restarting the training job after an internal error",
    "Uploading": "Uploading generated training model",
    "Stopping": "Stopping the training job",
    "Completed": "Training job completed",
    "Failed": "Training job failed",
    "Stopped": "Training job stopped",
    "MaxRuntimeExceeded": "Training job runtime exceeded MaxRuntimeInSeconds provided",
    "MaxWaitTimeExceeded": "Training job wait time exceeded MaxWaitTimeInSeconds provided",
}
_FAILURES = {
    "internal error": "InternalServerError: We encountered an internal error. Please try again.",
    "no data": "ClientError: Data download failed:AccessDenied (403): Access Denied",
}
_CAPACITY = (
    "CapacityError: Unable to provision requested ML compute capacity. Please retry using a different ML instance type."
)
_POLL = 0.2  # each look sends what was printed to CloudWatch's stand-in
_STEP = re.compile(r"step (\d+)/")
Outcome = Generator[float, None, str]


def find(region: Region, name: str) -> "TrainingJob":
    """Raises AwsError when there is none."""
    if name not in region.training_jobs:
        raise AwsError("ValidationException", "Requested resource not found.")
    return region.training_jobs[name]


class TrainingJob:
    def __init__(self, region: Region, request: dict[str, Any]) -> None:
        self.region, self.request = region, request
        self.name: str = request["TrainingJobName"]
        self.arn = f"arn:aws:sagemaker:{region.name}:{ACCOUNT}:training-job/{self.name}"
        self.status, self.secondary = "InProgress", ""
        self.created = datetime.now(timezone.utc)
        self.training_began: datetime | None = None
        self.ended: datetime | None = None
        self.transitions: list[dict[str, Any]] = []
        self.failure = ""
        self.stop_requested = False
        self.busy_seconds = 0.0  # with instances, which are billed
        self.containers: list[Container] = []
        self._failed: Container | None = None  # the first
        self.disk = Path(tempfile.mkdtemp(prefix="training-job-"))
        self.downloads = self.disk / "channels"
        self._starts = 0
        self._step = 0  # the highest that its log shows
        self._streams = set[str]()  # of the log that exist
        self._retries = request.get("RetryStrategy", {}).get("MaximumRetryAttempts", 0)
        region.training_jobs[self.name] = self
        self._become("Starting")
        region.world.clock.start(self._life())

    # What is known about it

    def describe(self) -> dict[str, Any]:
        """DescribeTrainingJob's answer."""
        spot = self.request.get("EnableManagedSpotTraining", False)
        taken = ((self.ended or datetime.now(timezone.utc)) - self.training_began) if self.training_began else None
        return {
            **self.request,
            "TrainingJobArn": self.arn,
            "TrainingJobStatus": self.status,
            "SecondaryStatus": self.secondary,
            "SecondaryStatusTransitions": self.transitions,
            "ModelArtifacts": {"S3ModelArtifacts": f"{self.request['OutputDataConfig']['S3OutputPath']}/{self.name}/"},
            "CreationTime": self.created,
            "LastModifiedTime": self.transitions[-1]["StartTime"],
            "EnableManagedSpotTraining": spot,
            **({"TrainingStartTime": self.training_began} if self.training_began else {}),
            **({"TrainingTimeInSeconds": max(1, int(taken.total_seconds()))} if taken and self.ended else {}),
            **({"BillableTimeInSeconds": max(1, int(self.busy_seconds))} if self.ended and self.training_began else {}),
            **({"TrainingEndTime": self.ended} if self.ended else {}),
            **({"FailureReason": self.failure} if self.failure else {}),
        }

    def summary(self) -> dict[str, Any]:
        """Of ListTrainingJobs."""
        fields = ("TrainingJobArn", "TrainingJobStatus", "SecondaryStatus", "CreationTime", "LastModifiedTime")
        described = self.describe()
        found = {"TrainingJobName": self.name, **{field: described[field] for field in fields}}
        return found | ({"TrainingEndTime": self.ended} if self.ended else {})

    def directory_of(self, source: dict[str, Any]) -> Path:
        """The local directory that stands for a directory of a file system: scenario's `file_systems`."""
        _, _mount_name, *below = Path(source["DirectoryPath"]).parts
        return Path(self.region.world.scenario.file_systems[source["FileSystemId"]], *below)

    # What is done to it

    def stop(self) -> None:
        self.stop_requested = True
        self.status = "Stopping"
        self._become("Stopping")

    def remove(self) -> None:
        """End its containers and forget its files."""
        for container in self.containers:
            container.remove()
        shutil.rmtree(self.disk, ignore_errors=True)

    # Its life

    def _become(self, secondary: str) -> None:
        now = datetime.now(timezone.utc)
        if self.transitions:
            self.transitions[-1]["EndTime"] = now
        self.secondary = secondary
        self.transitions.append({"Status": secondary, "StartTime": now, "StatusMessage": _MESSAGES[secondary]})

    def _end(self, status: str, secondary: str = "", failure: str = "") -> None:
        self.status, self.failure = status, failure
        self.ended = datetime.now(timezone.utc)
        self._become(secondary or status)
        self.transitions[-1]["EndTime"] = self.ended

    def _life(self) -> Process:
        resources, capacity = self.request["ResourceConfig"], self.region.world.scenario.capacity
        while True:
            free = [kind for kind in types_of(resources) if capacity.get(kind, math.inf) >= resources["InstanceCount"]]
            if free and "InstanceType" not in resources:
                resources["SelectedInstanceType"] = free[0]
            if not free:
                yield self.region.seconds("capacity.wait")
                self._end("Failed", failure=_CAPACITY)
                return
            yield self.region.seconds("training.start")
            if self.stop_requested:
                self._end("Stopped")
                return
            began = time.monotonic()
            outcome = yield from self._train()
            self.busy_seconds += time.monotonic() - began
            if outcome == "interrupted":
                self._become("Interrupted")
                yield self.region.seconds("training.interrupted")
                waited = datetime.now(timezone.utc) - self.created
                if waited > timedelta(seconds=self.request["StoppingCondition"]["MaxWaitTimeInSeconds"]):
                    self._end("Stopped", "MaxWaitTimeExceeded")
                    return
                self._become("Starting")
            elif outcome == "internal error" and self._retries:
                self._retries -= 1
                self._become("Restarting")
            elif outcome in _FAILURES:
                self._end("Failed", failure=_FAILURES[outcome])
                return
            else:
                yield from self._upload(outcome)
                return

    def _upload(self, outcome: str) -> Process:
        """What ends a job whose containers have ended."""
        if outcome == "ended":
            self._become("Uploading")
        self._upload_what_is_left()
        yield self.region.seconds("training.upload")
        if outcome == "ended" and self._failed:
            reason = self._failed.failure or next((one.failure for one in self.containers if one.failure), "")
            status = self._failed.process.returncode
            self._end("Failed", failure=f"AlgorithmError: {reason}, exit code: {status}"[:1024])
        elif outcome == "ended":
            self._end("Completed")
        else:
            self._end("Stopped", "MaxRuntimeExceeded" if outcome == "too long" else "")

    def _upload_what_is_left(self) -> None:
        """Files of /opt/ml that SageMaker uploads. It uploads checkpoints while they are written; here it is once."""
        s3 = self.region.client("s3")
        bucket, _, prefix = self.request["OutputDataConfig"]["S3OutputPath"].removeprefix("s3://").partition("/")
        for container in self.containers:
            for part, name in (("model", "output/model"), ("output/data", "output/data"), ("checkpoints",) * 2):
                for file in files_below(container.directory / "ml" / part):
                    below = file.relative_to(container.directory / "ml" / part)
                    s3.upload_file(str(file), bucket, f"{prefix}/{self.name}/{name}/{below}")

    def _train(self) -> Outcome:
        """One start of the containers, and what ended it: themselves, a stop, their time, a spot or internal error."""
        self._become("Downloading")
        self.training_began = self.training_began or datetime.now(timezone.utc)
        if not self._download():
            return "no data"
        yield self.region.seconds("training.download")
        self._starts += 1
        count = self.request["ResourceConfig"]["InstanceCount"]
        # one that no job has at the same time, of a test beside this one neither
        network = f"127.{1 + secrets.randbelow(254)}.{secrets.randbelow(256)}"
        hosts = {f"algo-{number}": f"{network}.{number}" for number in range(1, count + 1)}
        for container in self.containers:
            container.remove()
        epoch = int(time.time() * 1000)
        self.containers = [
            Container(self, number, hosts, self.disk / f"start-{self._starts}" / f"algo-{number}")
            for number in range(1, count + 1)
        ]
        streams = {container: f"{self.name}/{container.name}-{epoch}" for container in self.containers}
        self._become("Training")
        outcome = yield from self._watch(streams)
        if outcome == "too long":
            self.status = "Stopping"
            self._become("Stopping")
        if outcome != "internal error":  # ended: one has failed, and others may run
            yield from self._terminate(streams)
            if outcome == "interrupted" and not any(one.process.poll() != 0 for one in self.containers):
                outcome = "ended"  # they were done
        for container in self.containers:
            container.kill()
        while any(container.process.poll() is None for container in self.containers):
            yield _POLL
        self._log(streams)
        return outcome

    def _watch(self, streams: dict[Container, str]) -> Outcome:
        """Until all containers have ended, one has failed, or something else happens to the job."""
        limit = timedelta(seconds=self.request["StoppingCondition"]["MaxRuntimeInSeconds"])
        assert self.training_began is not None
        while True:
            self._log(streams)
            statuses = [container.process.poll() for container in self.containers]
            if any(statuses) or None not in statuses:
                self._failed = next((one for one in self.containers if one.process.returncode), None)
                return "ended"
            if self.stop_requested:
                return "stopped"
            if datetime.now(timezone.utc) - self.training_began > limit:
                return "too long"
            interruptions = self.region.world.scenario.interruptions_of(self.name)
            if interruptions and self._step >= interruptions[0][1]:
                kind, _ = interruptions.pop(0)
                return "internal error" if kind == "internal error" else "interrupted"
            yield _POLL

    def _terminate(self, streams: dict[Container, str]) -> Process:
        """SIGTERM to PID 1 of every container that runs, and the time to end."""
        deadline = time.monotonic() + self.region.seconds("training.grace")
        unsignalled = self.containers
        while time.monotonic() < deadline and any(one.process.poll() is None for one in self.containers):
            unsignalled = [container for container in unsignalled if not container.signal(signal.SIGTERM)]
            self._log(streams)
            yield _POLL

    def _download(self) -> bool:
        """Get the files of channels in S3, for all hosts alike; False if the role may not."""
        shutil.rmtree(self.downloads, ignore_errors=True)
        s3 = s3_backends[ACCOUNT]["aws"]  # without HTTP: the kit's code alone is hundreds of files
        for channel in self.request.get("InputDataConfig", []):
            if source := channel["DataSource"].get("S3DataSource"):
                directory = self.downloads / channel["ChannelName"]
                directory.mkdir(parents=True)
                bucket, _, prefix = source["S3Uri"].removeprefix("s3://").partition("/")
                for key in s3.list_objects(s3.buckets[bucket], prefix, None, None, None)[0]:
                    if not may(
                        self.region, self.request["RoleArn"], "s3:GetObject", f"arn:aws:s3:::{bucket}/{key.name}"
                    ):
                        return False
                    file = directory / key.name.removeprefix(prefix).lstrip("/")
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(key.value)
        return True

    def _log(self, streams: dict[Container, str]) -> None:
        """Send what the containers have printed to CloudWatch."""
        for container, stream in streams.items():
            if lines := [line for line in container.new_lines() if line]:
                self._log_lines(stream, lines)
                self._step = max([self._step, *(int(found[1]) for found in map(_STEP.match, lines) if found)])

    def _log_lines(self, stream: str, lines: list[str]) -> None:
        logs, now = self.region.client("logs"), int(time.time() * 1000)
        if stream not in self._streams:  # each look is a request less, or two
            with suppress(logs.exceptions.ResourceAlreadyExistsException):
                logs.create_log_group(logGroupName=LOG_GROUP)
            logs.create_log_stream(logGroupName=LOG_GROUP, logStreamName=stream)
            self._streams.add(stream)
        events = [{"timestamp": now, "message": line} for line in lines]
        logs.put_log_events(logGroupName=LOG_GROUP, logStreamName=stream, logEvents=events)
