"""What runs are called in AWS. Pure."""

import re

from hyperpod_ft.runs.run import Run

RUN_TAG = "hyperpod-ft:run"


def tag_value(run: Run) -> str:
    """The value of the tag RUN_TAG: name/id."""
    return f"{run.config.name}/{run.plan.run_id}"


def slug(run: Run, longest: int) -> str:
    """The run's name in the characters that SageMaker's names may have, cut to `longest`."""
    return re.sub(r"[^A-Za-z0-9]+", "-", run.config.name).strip("-")[:longest].rstrip("-") or "run"
