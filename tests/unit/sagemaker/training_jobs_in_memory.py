"""Training jobs in memory, for tests of what comes next; tests/aws has a stand-in that runs containers."""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from botocore import exceptions

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch import submit
from hyperpod_ft.launch.interface import JobState
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.status import RunStatus
from hyperpod_ft.runs import attempts
from hyperpod_ft.runs.attempts import Attempt
from hyperpod_ft.runs.job_files import NOTICE, NOTICE_STATUS
from hyperpod_ft.runs.records import Record
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import Selection
from hyperpod_ft.sagemaker.advance import advance
from hyperpod_ft.sagemaker.groups import job_name
from hyperpod_ft.sagemaker.store.sync import RunSync
from hyperpod_ft.sagemaker.training_jobs import TrainingJob, TrainingJobs

ROLE = "arn:aws:iam::123456789012:role/ft"
# A run file's section sagemaker.
FSX = {
    "region": "eu-central-1",
    "role": ROLE,
    "output": "s3://bucket/ft",
    "file_system": {
        "id": "fs-0123456789abcdef0",
        "directory": "/abcdefgh/hyperpod-ft",
        "subnets": ["subnet-0123456789abcdef0"],
        "security_groups": ["sg-0123456789abcdef0"],
    },
}
PENDING, RUNNING, COMPLETED = JobState("PENDING"), JobState("RUNNING"), JobState("COMPLETED")


class EveryImage:
    """A session, and its client for ECR, which has every image."""

    exceptions = exceptions

    def client(self, service: str) -> "EveryImage":
        assert service == "ecr"
        return self

    def batch_get_image(self, **request: Any) -> dict[str, Any]:
        return {"images": request["imageIds"]}


@dataclass
class Jobs:
    """Training jobs that do nothing: tests say what becomes of them. Names are unique, as SageMaker's are."""

    found: dict[str, TrainingJob] = field(default_factory=dict)
    requests: list[Mapping[str, Any]] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    refuse: str = ""
    session: Any = field(default_factory=EveryImage)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    before_create: Callable[[], object] = lambda: None

    def create(self, request: Mapping[str, Any]) -> bool:
        self.before_create()
        if self.refuse:
            raise UserError(f"training job {request['TrainingJobName']}: {self.refuse}")
        with self._lock:
            name = request["TrainingJobName"]
            if name in self.found:
                return False
            self.found[name] = TrainingJob(name, PENDING, False, request["HyperParameters"])
            self.requests.append(request)
        return True

    def find(self, name: str) -> TrainingJob | None:
        return self.found.get(name)

    def names(self, prefix: str) -> list[str]:
        return sorted(name for name in self.found if name.startswith(prefix))

    def stop(self, name: str) -> None:
        self.stopped.append(name)
        self.set_state(name, JobState("CANCELLED"))

    def set_state(self, name: str, state: JobState, began: bool = True) -> None:
        self.found[name] = replace(self.found[name], state=state, began=began)

    @property
    def created(self) -> list[str]:
        """Group and number of each job, oldest first."""
        return ["-".join(request["TrainingJobName"].split("-")[-2:]) for request in self.requests]


def finish(run: Run, stages: Iterable[str]) -> None:
    for stage in stages:
        record = Record(stage, run.plan[stage].fingerprint, {}, (), {}, "2026-01-01T00:00:00Z", 1.0, "algo-1", "x")
        record.write(run.paths.record_path(stage))


def name(run: Run, group: str, number: int = 1) -> str:
    return job_name(run, group, number)


def advance_run(run: Run, jobs: Jobs, leaving: str = "") -> str | None:
    return advance(run, as_jobs(jobs), RunSync(), leaving)


def as_jobs(jobs: Jobs) -> TrainingJobs:
    return jobs  # type: ignore[return-value]


def submitted(run: Run, **selection: Any) -> Launchers:
    launchers = Launchers()
    submit.submit(run, launchers, Selection(**selection), "sagemaker")
    return launchers


def shown(current: RunStatus) -> dict[str, str]:
    return {stage.stage: stage.state for stage in current.stages}


def left_to_be_continued(run: Run, job: str, checkpoint: int = 40) -> None:
    """What a supervisor leaves that has saved a checkpoint shortly before the limit."""
    attempts.add(
        run.paths, "train", Attempt(job, "2026-01-01T00:00:00Z", NOTICE_STATUS, False, (), NOTICE, 0, checkpoint, 41)
    )
    publish.write_text(run.paths.exit_marker("train", job), f"{NOTICE_STATUS}\n")
