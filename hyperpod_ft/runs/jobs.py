"""What was submitted of a run: its submissions, their jobs; which job this process belongs to, and its interpreter."""

import getpass
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from hyperpod_ft import __version__
from hyperpod_ft.runs.job_files import JOB_ID, PYTHON
from hyperpod_ft.runs.records import UtcTime, utc_now
from hyperpod_ft.runs.run_paths import RunPaths

# Parts of paths, and arguments of other programs. Files with them may have been written by anyone, such as a container.
StageName = Annotated[str, Field(pattern=r"^[a-z]+$")]
CODE_COPY = r"hyperpod-ft-[A-Za-z0-9.+]+-[0-9a-f]{32}"
JobId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]*$")]


@dataclass(frozen=True)
class Job:
    """One submission of one stage: an entry of a run's jobs.json."""

    stage: StageName
    job_id: JobId
    launcher: str
    submitted: UtcTime
    local_cluster: Annotated[str, Field(pattern=r"^([0-9a-f]{12})?$")] = ""  # its name, if it was submitted to one
    # of a training job: the name of the copy of the kit's code that it runs; no training job may write one
    code: Annotated[str, Field(pattern=f"^({CODE_COPY})?$")] = ""


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

    @classmethod
    def now(cls, code: Path) -> "Submission":
        """The submission that this process makes."""
        return cls(
            time=utc_now(),
            argv=sys.argv,
            directory=str(Path.cwd()),
            user=getpass.getuser(),
            host=platform.node(),
            hyperpod_ft=__version__,
            code=str(code),
            git=_git_state(),
        )


def _git_state() -> GitState | None:
    """Commit of the working directory, and which files differ from it; None outside a checkout."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=5)
        return done.stdout.strip()

    try:
        return GitState(git("rev-parse", "HEAD"), git("status", "--porcelain").splitlines())
    except (OSError, subprocess.SubprocessError):
        return None


def own_job_id() -> str:
    """The id of the job that this process belongs to, which its script exports; `manual` for one started by hand."""
    return os.environ.get(JOB_ID, "manual")


def job_python(paths: RunPaths) -> Path:
    """The interpreter of the run's stages that need torch, where this process is: a container has its own."""
    given = os.environ.get(PYTHON)
    return Path(given) if given else paths.python
