"""Section `tracking` of a run file: experiment trackers. It is not part of the run's identity."""

from typing import Annotated, Literal

from pydantic import Field

from hyperpod_ft.config.fields import PlainPath, Section, matches

PROJECT = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
PROJECT_CHARACTERS = "letters, digits, dots, underscores and hyphens"
Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class Tracking(Section):
    """Experiment trackers that show a training run's metrics while it runs. Changes nothing in the run."""

    trackers: tuple[Tracker, ...] = Field(
        (),
        description="Where the rows of metrics.jsonl, the run file and the final figures are published, any of"
        " `tensorboard`, `wandb` (Weights & Biases), `mlflow` and `trackio`. Each is set up by its own environment"
        " variables (docs/tracking.md); keys come from the shell that submits.",
    )
    project: Annotated[str, matches(PROJECT, PROJECT_CHARACTERS)] | None = Field(
        None, description="Project (W&B, Trackio) or experiment (MLflow); the run's `name` if not set."
    )
    python: PlainPath | None = Field(
        None,
        description="Path of an existing interpreter that has the trackers' packages, or `current` for the one that"
        " runs hyperpod-ft. If not set, the `env` stage creates a virtual environment for each tracker below"
        " `cluster.root`.",
    )
