"""What training jobs read of a run file: section `sagemaker`, and where the run's store is."""

import re
from pathlib import Path

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sections.sagemaker import SageMaker
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.run import Run

SAGEMAKER = "sagemaker"  # the launcher of training jobs
RUN_TAG = "hyperpod-ft:run"  # its value is the run's full name


def sagemaker_section(config: RunConfig) -> SageMaker:
    """The run file's section. Raises UserError without one."""
    section = config.sagemaker
    if section is None:
        raise UserError("--launcher sagemaker: the run file has no section sagemaker", "add it (docs/training-jobs.md)")
    return section


def store_of(config: RunConfig) -> str | None:
    """The S3 prefix in which training jobs keep the run, if they do not mount a file system."""
    section = config.sagemaker
    return section.store if section else None


def store_url(run: Run, path: Path) -> str:
    """Where the run's store has a path below `cluster.root`."""
    return f"{store_of(run.config)}/{run.paths.relative(path)}"


def slug(config: RunConfig, longest: int) -> str:
    """The run's name in the characters that SageMaker's names may have, cut to `longest`."""
    return re.sub(r"[^A-Za-z0-9]+", "-", config.name).strip("-")[:longest].rstrip("-") or "run"
