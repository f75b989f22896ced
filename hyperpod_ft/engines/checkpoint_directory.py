"""A run's sharded checkpoints on disk: their contents, whether they are usable, and how many are kept.

One checkpoint is a directory in `run.checkpoints`. Engine torch writes (neuron/checkpoints.py has the other format):

    step-00000400/
        checkpoint.json       written last; a checkpoint without it, or with another size or digest, is ignored
        .metadata             torch.distributed.checkpoint's index (a pickle of its Metadata class)
        __0_0.distcp ...      one file per rank: tensors only, readable with torch.load(weights_only=True)

Keys of the DCP state dict, every one a tensor (no pickled objects):

    model.<fqn>                 trainable parameters, global shape. `<fqn>` is what `named_parameters()` says:
                                method lora: model.layers.0.self_attn.q_proj.lora_A.weight (engines/torch/lora)
                                method full: model.layers.0.self_attn.q_proj.weight; a tied output matrix is absent,
                                as in the base model's files
                                fp32 always: the master weights
    optimizer.<fqn>.exp_avg     AdamW's moments, like the parameter
    optimizer.<fqn>.exp_avg_sq  with training.optimizer_state int8: indices, uint8, and `.exp_avg_scale`,
                                `.exp_avg_sq_scale` (engines/torch/optimizer/moments.py)
    random.<rank>.cpu           that rank's generator state, uint8; `random.<rank>.device` too on an accelerator

`best/` has the same format, with `model.` keys alone: the weights with the lowest validation loss
(`training.keep_best`). So has the only checkpoint of a run with `training.save_only_model`. Their dtype is
`training.weights_dtype`.

`checkpoint.json` is described in checkpoint/sharded/description.py; its `progress` is `TrainingProgress`.
The learning rate and the position in the data are functions of the step alone, so neither is stored.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.checkpoint.formats.model_directory import read_config
from hyperpod_ft.checkpoint.sharded import description
from hyperpod_ft.checkpoint.sharded.description import BaseModelSource, Description, LoraDescription, RankDegrees
from hyperpod_ft.engines.training_progress import TrainingProgress
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.families import family_of
from hyperpod_ft.planning.lora_targets import targets
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import BEST, checkpoint_name

TRAIN_AGAIN = "run stage train again: hyperpod-ft submit --from train --force"


def why_unusable(directory: Path, fingerprint: str, *, shared: bool = True) -> str:
    """Why a checkpoint is incomplete or does not belong to this run, by names and sizes; empty when it can be used.

    On a volume that is not `shared`, files that other nodes wrote may be missing.
    """
    try:
        found = description.read(directory)
    except UserError as error:
        return error.problem.removeprefix(f"{directory}/").replace(": is", " is", 1)
    if found.fingerprint != fingerprint:
        return "another configuration wrote it"
    if directory.name not in (checkpoint_name(found.step), BEST):
        return f"its description is of step {found.step}"
    for name, size in found.files.items():
        if not (directory / name).is_file():
            if not shared:
                continue
            return f"{name} is missing"
        actual = (directory / name).stat().st_size
        if actual != size:
            return f"{name} has {actual} bytes, was {size}"
    return ""


def remove_leftovers(run: Run) -> None:
    """Remove the partial checkpoints of attempts that were killed while saving. One rank a volume, before training."""
    publish.remove_leftovers(run.checkpoints)


def discard_later_best(run: Run, step: int) -> None:
    """Discard the best weights when they are of a step after `step`, from which training resumes.

    One rank on each volume calls it. The steps after `step` are trained again; on accelerators their bits may differ,
    so that another step may be best.
    """
    with contextlib.suppress(UserError):  # unusable ones are replaced, or found by `check_best`
        if description.read(run.best_checkpoint).step > step:
            publish.discard(run.best_checkpoint)


def check_best(run: Run, step: int | None, *, shared: bool = True) -> None:
    """Raise UserError when the best weights cannot be used, or are not those of `step`, the best one if known.

    `shared` as for `why_unusable`.
    """
    directory = run.best_checkpoint
    if reason := why_unusable(directory, run.plan["train"].fingerprint, shared=shared):
        raise UserError(f"{directory}: not a complete checkpoint of this run: {reason}", TRAIN_AGAIN)
    found = description.read(directory).step
    if step is not None and found != step:
        raise UserError(f"{directory}: is of step {found}, but the best step was {step}", TRAIN_AGAIN)


def newest_first(run: Run) -> list[Path]:
    return list(reversed(run.checkpoints_by_step().values()))


def delete_old(run: Run, newest: Path, *, shared: bool = True) -> None:
    """Delete complete checkpoints beyond `training.keep_checkpoints`, but never `newest`, the one just written.

    One rank a volume; `shared` as for `why_unusable`. `newest` may not have the highest step: training resumes from
    before a damaged checkpoint.
    """
    fingerprint = run.plan["train"].fingerprint
    found = [path for path in newest_first(run) if path != newest]
    others = [path for path in found if not why_unusable(path, fingerprint, shared=shared)]
    for directory in others[run.config.training.keep_checkpoints - 1 :]:
        publish.discard(directory)


@dataclass(frozen=True)
class CheckpointFile:
    """A file of a checkpoint, as the rank reports it that wrote it: its size in bytes, and SHA-256."""

    size: int
    sha256: str

    @classmethod
    def of(cls, file: Path, sha256: str) -> "CheckpointFile":
        return cls(file.stat().st_size, sha256)


def write_description(
    run: Run, progress: TrainingProgress, directory: Path, files: Mapping[str, CheckpointFile]
) -> None:
    """Write the description of an otherwise complete checkpoint; `files`: all of its files, by name."""
    config, degrees = run.config, run.plan.degrees
    model_type = str(read_config(run.base_model).get("model_type", ""))
    family = family_of(model_type)
    lora = config.lora.model_dump() | {
        "target_modules": targets(config.lora, model_type),
        "fan_in_fan_out": family is not None and family.transposed,
        "task": "SEQ_2_SEQ_LM" if config.dataset.max_target_length else "CAUSAL_LM",
    }
    described = Description(
        engine=config.engine,
        step=progress.step,
        fingerprint=run.plan["train"].fingerprint,
        method=config.training.method,
        base_model=BaseModelSource(source=config.model.source, revision=config.model.revision),
        lora=LoraDescription.model_validate(lora) if config.training.method == "lora" else None,
        degrees=RankDegrees(
            world_size=degrees.world_size,
            data_parallel=degrees.data_parallel,
            pipeline_parallel=degrees.pipeline_parallel,
            context_parallel=degrees.context_parallel,
            tensor_parallel=degrees.tensor_parallel,
        ),
        progress=asdict(progress),
        files={name: file.size for name, file in files.items()},
        sha256={name: file.sha256 for name, file in files.items()},
    )
    description.write(directory, described)
