"""The commands of a user who runs training jobs, against the stand-in for AWS."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hyperpod_ft.runs.run import Run
from tests.aws.kit import Started, environment_of, start
from tests.aws.training_run import SECONDS
from tests.waiting import wait_for

if TYPE_CHECKING:
    from tests.aws.conftest import Aws


class Command:
    """`hyperpod-ft` in a directory with a run file, against the stand-in for AWS."""

    def __init__(
        self, directory: Path, aws: "Aws", values: dict[str, Any], environment: Mapping[str, str] = {}
    ) -> None:
        """`environment`: further variables, such as those of a Slurm cluster."""
        self.directory, self.aws = directory, aws
        values["cluster"]["instance_type"] = "c7i.xlarge"
        values["sagemaker"] |= {"spot": False, "cpu_instance_type": "m5.large"}
        (directory / "run.yaml").write_text(yaml.safe_dump(values))
        own = {"XDG_STATE_HOME": str(directory / "state"), "HYPERPOD_FT_POLL_SECONDS": "3"}
        self.environment = {**environment_of(aws, directory), **own, **environment}

    def start(self, *arguments: str) -> Started:
        return start(self.directory, self.environment, *arguments)

    def run(self, *arguments: str, status: int = 0) -> str:
        return self.start(*arguments).finish(status)

    def status(self, status: int = 0) -> Any:
        return json.loads(self.run("status", "--json", status=status))

    @property
    def opened(self) -> Run:
        (path,) = (Path(self.status()["directory"]),)
        return Run.open(path)

    def wait_until_ended(self) -> None:
        jobs = self.aws.client("sagemaker")

        def ended() -> bool:
            unended = ("InProgress", "Stopping")
            return not any(jobs.list_training_jobs(StatusEquals=status)["TrainingJobSummaries"] for status in unended)

        wait_for(ended, SECONDS, every=0.5)

    def jobs(self) -> list[str]:
        """The names of the training jobs, oldest first."""
        found = self.aws.client("sagemaker").list_training_jobs(SortBy="CreationTime", SortOrder="Ascending")
        return [job["TrainingJobName"] for job in found["TrainingJobSummaries"]]

    def created(self) -> list[str]:
        """The training jobs, by group and number, oldest first."""
        return ["-".join(name.split("-")[-2:]) for name in self.jobs()]
