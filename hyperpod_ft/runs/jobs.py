"""What was submitted of a run: its submissions, their jobs, and which job this process belongs to."""

import os
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ft.runs.job_files import JOB_ID
from hyperpod_ft.runs.records import UtcTime

SAGEMAKER = "sagemaker"  # the launcher of training jobs


@dataclass(frozen=True)
class Job:
    """One submission of one stage: an entry of a run's jobs.json."""

    stage: str
    job_id: str
    launcher: str
    submitted: UtcTime
    slurm_conf: str = ""  # of the cluster it was submitted to, when one was named
    code: str = ""  # of a training job: the name of the copy of the kit's code that it runs

    @property
    def is_training_job(self) -> bool:
        return self.launcher == SAGEMAKER

    @property
    def cluster_is_gone(self) -> bool:
        """Whether it was a local cluster that has ended: its slurm.conf exists only while it runs."""
        return bool(self.slurm_conf) and not Path(self.slurm_conf).exists()


@dataclass(frozen=True)
class GitState:
    """A commit, and which files of its checkout differ from it."""

    commit: str
    changed: list[str]  # lines of `git status --porcelain`


@dataclass(frozen=True)
class Submission:
    """Who submitted a run, when, with which code."""

    time: UtcTime
    argv: list[str]
    directory: str  # that it was submitted from
    user: str
    host: str
    hyperpod_ft: str  # version
    code: str  # path of the copy of the kit's code that its jobs run
    git: GitState | None  # of `directory`; None outside a checkout


def own_job_id() -> str:
    """The id of the job that this process belongs to, which its script exports; `manual` for one started by hand."""
    return os.environ.get(JOB_ID, "manual")
