"""Who submits a run, from where and with which code: what its directory `provenance/` records."""

import getpass
import platform
import subprocess
import sys
from pathlib import Path

from hyperpod_ft import __version__
from hyperpod_ft.launch.render import Installation
from hyperpod_ft.runs.jobs import GitState, Submission
from hyperpod_ft.runs.records import utc_now


def submission(installation: Installation) -> Submission:
    """The submission that this process makes now."""
    return Submission(
        time=utc_now(),
        argv=sys.argv,
        directory=str(Path.cwd()),
        user=getpass.getuser(),
        host=platform.node(),
        hyperpod_ft=__version__,
        code=str(installation.code),
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
