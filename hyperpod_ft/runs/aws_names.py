"""What runs are called in AWS. Pure."""

import re

from hyperpod_ft.runs.run import Run

RUN_TAG = "hyperpod-ft:run"  # its value is the run's full name


def slug(run: Run, longest: int) -> str:
    """The run's name in the characters that SageMaker's names may have, cut to `longest`."""
    return re.sub(r"[^A-Za-z0-9]+", "-", run.config.name).strip("-")[:longest].rstrip("-") or "run"
