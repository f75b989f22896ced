"""How a run's checkpoints are named in its store, and which of them are kept there. Pure functions.

step-00000400/    the files of all nodes; checkpoint.json, pushed last, makes it complete
best-00000350/    the best weights as of that step: `best/` on the volume, where they are replaced
votes/<name>-<digest>/<node>    "this node has pushed its files", until the checkpoint is complete
"""

import re
from collections.abc import Collection
from pathlib import Path

from hyperpod_ft.checkpoint.sharded.description import Description
from hyperpod_ft.runs.records import Record
from hyperpod_ft.runs.run_paths import RunPaths
from hyperpod_ft.runs.training_paths import BEST
from hyperpod_ft.sagemaker.groups import number_of

_NAME = re.compile(r"(step|best)-\d{8}")
_VOTE = re.compile(rf"votes/{_NAME.pattern}-[0-9a-f]{{16}}/\d+")


def stored_name(directory: Path, step: int) -> str:
    """The name in the store of a checkpoint on the volume. `step`: of the best weights."""
    return f"best-{step:08d}" if directory.name == BEST else directory.name


def recorded_name(directory: Path, record: Record) -> str:
    """The same for a checkpoint that a stage recorded."""
    step = record.facts.get("best_step")
    return stored_name(directory, step if isinstance(step, int) else 0)


def stored_outputs(run_paths: RunPaths, record: Record) -> dict[str, str]:
    """The names in the store of what a stage recorded, by those on the volume."""
    best = f"{run_paths.relative(run_paths.best_checkpoint)}/"
    stored = f"{run_paths.relative(run_paths.checkpoints)}/{recorded_name(run_paths.best_checkpoint, record)}/"
    paths = [output.path for output in record.outputs]
    return {path: stored + path.removeprefix(best) if path.startswith(best) else path for path in paths}


def is_checkpoint(name: str) -> bool:
    return bool(_NAME.fullmatch(name))


def is_best(name: str) -> bool:
    return name.startswith("best-")


def votes(name: str, described: Description) -> str:
    """Where the nodes vote for this content of a checkpoint."""
    return f"votes/{name}-{described.digest[:16]}"


def is_vote(name: str) -> bool:
    return bool(_VOTE.fullmatch(name))


def vote_of(name: str) -> tuple[str, int]:
    """The checkpoint, and the number of the node, of a vote."""
    _, voted, node = name.split("/")
    return voted.rpartition("-")[0], int(node)


def is_later(name: str, than: str) -> bool:
    """Whether a checkpoint is of the same kind as another, and of a later step."""
    return is_best(name) == is_best(than) and number_of(name) > number_of(than)


def superseded(names: Collection[str], newest: str, keep: int) -> list[str]:
    """Complete checkpoints that can be removed, now that `newest` is complete too.

    Of those for a restart, `newest` and the last `keep` - 1 others stay: training may have resumed from before a
    damaged one, so that `newest` has not the highest step. A training run that resumes from the first of them needs the
    best weights as of then, and all later ones.
    """
    steps = sorted((name for name in names if not is_best(name) and name != newest), key=number_of)
    others = keep if is_best(newest) else keep - 1
    kept = [*steps[max(0, len(steps) - others) :], *([] if is_best(newest) else [newest])]
    first = min(map(number_of, kept), default=0)
    best = sorted((name for name in names if is_best(name) and number_of(name) <= first), key=number_of)
    return [*(name for name in steps if name not in kept), *best[:-1]]
