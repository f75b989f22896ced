"""What a training leaves in its run's directory."""

import re
from pathlib import Path

BEST = "best"  # name of the checkpoint with the lowest validation loss
_STEP = re.compile(r"step-(\d{8})")


def checkpoint_name(step: int) -> str:
    """For example `step-00000400`."""
    return f"step-{step:08d}"


class TrainingPaths:
    """The paths below `directory`, the run's."""

    directory: Path

    @property
    def checkpoints(self) -> Path:
        """Sharded checkpoints, one directory `step-00000400` each."""
        return self.directory / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / checkpoint_name(step)

    @property
    def best_checkpoint(self) -> Path:
        """The weights with the lowest validation loss, of a run with `training.keep_best`."""
        return self.checkpoints / BEST

    def checkpoints_by_step(self) -> dict[int, Path]:
        """Everything in `checkpoints` named like a checkpoint, complete or not, in ascending order of steps."""
        found = {
            int(match[1]): path for path in self.checkpoints.glob("step-*") if (match := _STEP.fullmatch(path.name))
        }
        return dict(sorted(found.items()))

    @property
    def reference_log_probabilities(self) -> Path:
        """The log-probabilities of preferences before training (objective dpo), one .npy a split."""
        return self.directory / "reference"

    @property
    def reference_count(self) -> Path:
        """How many log-probabilities are measured."""
        return self.reference_log_probabilities / "measured"

    @property
    def reward_files(self) -> Path:
        """Copies of the user's reward functions, by their number in the run file."""
        return self.directory / "rewards"

    @property
    def sampled_answers(self) -> Path:
        """Some of the answers that the training has sampled (objectives grpo and rloo)."""
        return self.directory / "sampled.json"

    @property
    def metrics_path(self) -> Path:
        """One JSON object a logged step."""
        return self.directory / "metrics.jsonl"
