"""The files of a run directory that decide what a container runs."""

from pathlib import Path

from hyperpod_ft.digests import files_sha256
from hyperpod_ft.runs import job_files
from hyperpod_ft.sagemaker.groups import GROUPS

FROZEN = ("run.yaml", "plan.json")


def run_files_digest(run_directory: Path) -> str:
    """Of the plan and the scripts of the stages of training jobs. Whoever creates a job computes it from the files that
    it has itself; in a store, everyone who may write there could change them."""
    files = [run_directory / name for name in FROZEN]
    files += [job_files.script(run_directory, stage) for stages in GROUPS.values() for stage in stages]
    return files_sha256({file.relative_to(run_directory).as_posix(): file for file in files if file.is_file()})
