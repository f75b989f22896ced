"""What runs are called in AWS. Pure."""

import re

from hyperpod_ft.config.run_config import RunConfig

RUN_TAG = "hyperpod-ft:run"  # its value is the run's full name


def slug(config: RunConfig, longest: int) -> str:
    """The run's name in the characters that SageMaker's names may have, cut to `longest`."""
    return re.sub(r"[^A-Za-z0-9]+", "-", config.name).strip("-")[:longest].rstrip("-") or "run"
