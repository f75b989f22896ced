"""A step of a run's training again, from its recorded rows: are the recorded figures those that it gives?

python -m hyperpod_ft.replay RUN_DIR STEP

Exit status: 0 they are, 3 they are not, 2 it cannot be computed; 1 is that of a crash. Nothing in the run changes.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hyperpod_ft.checkpoint.formats.model_directory import of_language_model, read_config
from hyperpod_ft.config.instances import CATALOGUE
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sections.parallelism import Parallelism
from hyperpod_ft.engines.torch.replay import replay
from hyperpod_ft.errors import EXIT_USER_ERROR, UserError, print_error
from hyperpod_ft.planning.layout import Degrees
from hyperpod_ft.planning.model_fit import check_model_directory
from hyperpod_ft.replay.figures import bound_of, wrong_figures
from hyperpod_ft.runs.results import places, usage
from hyperpod_ft.runs.results.usage import Usage
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages.train import training_task

_DIFFERS = 3  # Python ends any crash with 1
_ALONE = Degrees(1, 1, 1, 1)


def main() -> None:
    """Replay a step from the command line."""
    try:
        sys.exit(0 if _replay(Run.open(Path(sys.argv[1])), int(sys.argv[2])) else _DIFFERS)
    except UserError as error:
        print_error("replay", str(error))
        sys.exit(EXIT_USER_ERROR)


def _replay(run: Run, step: int) -> bool:
    """Print what the step gives beside what is recorded; whether they agree."""
    rows = _recorded(run, step)
    row, ran = rows[step]
    config = _alone(run, ran)
    if ran.ranks > 1 or config.instance.device != CATALOGUE[ran.instance_type].device:
        _refuse_dropout(run)
    with tempfile.TemporaryDirectory(prefix="hyperpod-ft-replay-") as scratch:
        certificate, base = run.journal.certificate(), run.paths.base_model
        layout = check_model_directory(config, _ALONE, base, certificate).layout
        found = replay(replace(training_task(run, layout), config=config), step, Path(scratch))
    bound = bound_of(run, found.device, [rows[number][1] for number in rows if found.begun < number <= step])
    begun = f"the checkpoint of step {found.begun}" if found.begun else "the base model"
    print(f"step {step} of {run.paths.full_name}, from {begun}, by one process on {found.device}")
    print(f"expected: {'within rounding' if bound.relative else 'the same bits'}, since {bound.why}")
    wrong = wrong_figures(found, row, bound)
    if wrong:
        print(
            f"wrong: {', '.join(wrong)}; hyperpod-ft verify {run.paths.directory} --run says whether a file has changed"
        )
    return not wrong


def _recorded(run: Run, step: int) -> dict[int, tuple[dict[str, Any], Usage]]:
    """The rows of metrics.jsonl by step, each with its attempt; if that is not known, one where the run is now.

    Raises UserError when the step has none, or cannot be computed here.
    """
    if run.config.engine != "torch":
        raise UserError(
            f"engine: {run.config.engine}: only steps of engine torch can be computed again", "compare runs"
        )
    for stage in ("download", "dataset"):
        run.journal.require_done(stage, "a step needs the base model and the rows")
    here = replace(usage.beginning(run), host="")
    rows = {
        row["step"]: (row, ran if ran and ran.instance_type in CATALOGUE else here)
        for row, ran in places.rows(run.paths, usage.read(run.paths))
    }
    if step not in rows:
        logged = min(rows, key=lambda other: abs(other - step), default=None)
        remedy = "train first" if logged is None else f"the nearest that is: --step {logged}"
        raise UserError(f"step {step}: is not in {run.paths.metrics_path}", remedy)
    return rows


def _refuse_dropout(run: Run) -> None:
    """Raise UserError when the ranks drew masks that this process cannot draw."""
    model = of_language_model(read_config(run.paths.base_model)).items()
    found = {f"config.json: {key}" for key, value in model if "drop" in key and isinstance(value, float) and value}
    if found := found | ({"lora.dropout"} if run.config.lora.dropout else set()):
        raise UserError(
            f"{min(found)}: dropout, whose masks one process draws only for a run of one rank on such a device",
            "compare runs",
        )


def _alone(run: Run, ran: Usage) -> RunConfig:
    """The config with which one process computes the steps of an attempt, with the same forward passes.

    On a CPU without such a GPU.
    """
    config, found, device = run.config, torch.accelerator.current_accelerator(), CATALOGUE[ran.instance_type].device
    here = device == "cpu" or (device == "cuda" and found is not None and found.type == device)
    size, cluster, degrees = ran.micro_batch_size, config.cluster, run.plan.degrees
    now = degrees.world_size, cluster.instance_type, config.training.micro_batch_size
    if here and now == (1, ran.instance_type, size):
        return config
    rows = config.rows_per_step(degrees.data_parallel)
    numbers = {"micro_batch_size": size, "gradient_accumulation_steps": rows // size}
    return config.model_copy(
        update={
            "cluster": cluster.model_copy(update={"nodes": 1, "instance_type": ran.instance_type if here else "local"}),
            "training": config.training.model_copy(update=numbers),
            "parallelism": Parallelism(tensor_parallel=1, ranks_per_node=1),
        }
    )


if __name__ == "__main__":
    main()
