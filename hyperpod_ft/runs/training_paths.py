"""What a training leaves in its run's directory."""

import re
from pathlib import Path

BEST = "best"  # name of the checkpoint with the lowest validation loss
_STEP = re.compile(r"step-(\d{8})")


def checkpoint_name(step: int) -> str:
    """For example `step-00000400`."""
    return f"step-{step:08d}"


class PathBelow:
    """A path below a directory of a run: `of` names the property that has it, by default the run's own."""

    def __init__(self, *parts: str, of: str = "directory") -> None:
        self._parts, self._of = parts, of

    def __get__(self, paths: object, _: object = None) -> Path:
        return Path(getattr(paths, self._of), *self._parts)


class TrainingPaths:
    """The paths below `directory`, the run's."""

    directory: Path

    checkpoints = PathBelow("checkpoints")  # sharded, one directory `step-00000400` each
    best_checkpoint = PathBelow("checkpoints", BEST)  # of a run with `training.keep_best`
    # the log-probabilities of preferences before training (objective dpo), one .npy a split; how many are measured
    reference_log_probabilities = PathBelow("reference")
    reference_count = PathBelow("reference", "measured")
    reward_files = PathBelow("rewards")  # copies of the user's reward functions, by their number in the run file
    sampled_answers = PathBelow("sampled.json")  # some of those that objectives grpo and rloo have sampled
    metrics_path = PathBelow("metrics.jsonl")  # one JSON object a logged step

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / checkpoint_name(step)

    def checkpoints_by_step(self) -> dict[int, Path]:
        """Everything in `checkpoints` named like a checkpoint, complete or not, in ascending order of steps."""
        found = {
            int(match[1]): path for path in self.checkpoints.glob("step-*") if (match := _STEP.fullmatch(path.name))
        }
        return dict(sorted(found.items()))
