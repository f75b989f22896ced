"""A run's sharded checkpoints on disk: their contents, whether they are usable, and how many are kept.

One checkpoint is a directory in `task.checkpoints`. neuron/checkpoints.py and trl/checkpoints.py have the formats of
those engines; engine torch writes:

    step-00000400/
        checkpoint.json       written last; a checkpoint without it, or with another size or digest, is ignored
        held.json             which boxes of its tensors are tensors of the base model's files, where transformers
                              arranges those otherwise
        .metadata             torch.distributed.checkpoint's index (a pickle of its Metadata class)
        __0_0.distcp ...      one file per rank: tensors only, readable with torch.load(weights_only=True)

Keys of the DCP state dict, every one a tensor (no pickled objects):

    model.<fqn>                 trainable parameters, global shape. `<fqn>` is what `named_parameters()` says, or the
                                name in the base model's files where transformers only renames (GPT-NeoX's embed_out):
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
import errno
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from hyperpod_ft import digests, publish
from hyperpod_ft.checkpoint.consolidate import check_fit
from hyperpod_ft.checkpoint.formats.model_directory import (
    is_classifier,
    is_encoder_decoder,
    of_language_model,
    read_config,
)
from hyperpod_ft.checkpoint.sharded import description
from hyperpod_ft.checkpoint.sharded.description import (
    BaseModelSource,
    Description,
    HeldParts,
    LoraDescription,
    RankDegrees,
)
from hyperpod_ft.checkpoint.sharded.sharded import of_engine
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor, Piece, contiguous_strides
from hyperpod_ft.config.sections.training import Lora
from hyperpod_ft.engines.interface import TrainingProgress, TrainingTask
from hyperpod_ft.errors import VOLUME_ERRORS, UserError
from hyperpod_ft.planning.families import family_of
from hyperpod_ft.planning.lora import target_modules
from hyperpod_ft.runs.training_paths import BEST, checkpoint_name

if TYPE_CHECKING:
    from hyperpod_ft.engines.ranks import Ranks

TRAIN_AGAIN = "run stage train again: hyperpod-ft submit RUN_FILE --from train --force"


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


def discard_later_best(directory: Path, step: int) -> None:
    """Discard the best weights when they are of a step after `step`, from which training resumes.

    One rank on each volume calls it. The steps after `step` are trained again; on accelerators their bits may differ,
    so that another step may be best.
    """
    with contextlib.suppress(UserError):  # unusable ones are replaced, or found by `check_best`
        if description.read(directory).step > step:
            publish.discard(directory)


def check_best(directory: Path, fingerprint: str, step: int | None, *, shared: bool = True) -> None:
    """Raise UserError when the best weights cannot be used, or are not those of `step`, the best one if known.

    `shared` as for `why_unusable`.
    """
    if reason := why_unusable(directory, fingerprint, shared=shared):
        raise UserError(f"{directory}: not a complete checkpoint of this run: {reason}", TRAIN_AGAIN)
    found = description.read(directory).step
    if step is not None and found != step:
        raise UserError(f"{directory}: is of step {found}, but the best step was {step}", TRAIN_AGAIN)


def of_trained(task: TrainingTask, progress: TrainingProgress, *, leads: bool, shared: bool = True) -> Path:
    """The checkpoint that the tuned model is made of, of a training that has ended.

    One rank `leads`: it says if training stopped early. Raises UserError as `check_best`; `shared` as for
    `why_unusable`.
    """
    if progress.stopped_early and leads:
        print(
            f"train: stopped after step {progress.step}: the validation loss was lowest,"
            f" {progress.best_validation_loss:.4f}, after step {progress.best_step}",
            flush=True,
        )
    if not task.config.training.keep_best:
        return task.checkpoint(progress.step)
    if leads:
        check_best(task.best_checkpoint, task.fingerprint, progress.best_step, shared=shared)
    return task.best_checkpoint


def delete_old(task: TrainingTask, newest: Path, *, shared: bool = True) -> None:
    """Delete complete checkpoints beyond `training.keep_checkpoints`, but never `newest`, the one just written.

    One rank a volume; `shared` as for `why_unusable`. `newest` may not have the highest step: training resumes from
    before a damaged checkpoint.
    """
    found = [path for path in reversed(task.checkpoints_by_step().values()) if path != newest]
    others = [path for path in found if not why_unusable(path, task.fingerprint, shared=shared)]
    for directory in others[task.config.training.keep_checkpoints - 1 :]:
        publish.discard(directory)


@contextlib.contextmanager
def reporting_full_volumes(directory: Path) -> Iterator[None]:
    """Raise UserError where the block cannot write a checkpoint to `directory`, and another attempt could not either.

    Errors that may pass, such as one of input and output or of a connection, stay what they are: ranks start again.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch.save wraps the OSError in a RuntimeError, safetensors in its own error
        cause = error if isinstance(error, OSError) else error.__context__
        lasts = isinstance(cause, OSError) and cause.errno in VOLUME_ERRORS and cause.errno != errno.EIO
        if not lasts and not isinstance(error, SafetensorError):
            raise
        raise UserError(
            f"{directory}: the checkpoint cannot be written: {cause or error}", "free or repair the volume, then resume"
        ) from error


@dataclass(frozen=True)
class CheckpointFile:
    """A file of a checkpoint, as the rank reports it that wrote it: its size in bytes, and SHA-256."""

    size: int
    sha256: str

    @classmethod
    def of(cls, file: Path, sha256: str) -> "CheckpointFile":
        return cls(file.stat().st_size, sha256)


def publish_written(task: TrainingTask, ranks: "Ranks", progress: TrainingProgress, partial: Path, final: Path) -> None:
    """Publish as `final` what ranks have written to `partial`, on the volume of all; delete old checkpoints.

    Collective. Each rank flushes a part of the files to disk, and reads it for its digests.
    """
    occasion = f"checkpoint/{final.name}/{progress.step}"
    ranks.gather(f"{occasion}/written", None)
    found = {}
    for file in sorted(partial.rglob("*"))[ranks.rank :: ranks.world_size]:
        publish.fsync(file)
        if file.is_file():
            found[file.relative_to(partial).as_posix()] = digests.file_sha256(file)
    parts = ranks.gather(f"{occasion}/digests", found)
    if ranks.is_rank_0:
        files = {name: CheckpointFile.of(partial / name, digest) for part in parts for name, digest in part.items()}
        write_description(task, progress, partial, files)
        publish.replace_directory(final, partial)
        if final != task.best_checkpoint:
            delete_old(task, final)
    ranks.gather(f"{occasion}/published", None)


def write_description(
    task: TrainingTask,
    progress: TrainingProgress,
    directory: Path,
    files: Mapping[str, CheckpointFile],
    held: HeldParts | None = None,
    lora: LoraDescription | None = None,
) -> None:
    """Write the description of an otherwise complete checkpoint, and `held`; `files`: its other files, by name.

    `lora`: where it is not what the run file and the model's type say.
    """
    config = task.config
    if config.training.method == "lora" and lora is None:
        lora = describe_lora(config.lora, task.base_model)
    if held:
        description.write_held(directory, held)
        file = directory / description.HELD
        files = {**files, description.HELD: CheckpointFile.of(file, digests.file_sha256(file))}
    described = Description(
        engine=config.engine,
        step=progress.step,
        fingerprint=task.fingerprint,
        method=config.training.method,
        base_model=_base_model(task),
        lora=lora,
        degrees=RankDegrees.model_validate(task.layout.degrees, from_attributes=True),
        progress=asdict(progress),
        files={name: file.size for name, file in files.items()},
        sha256={name: file.sha256 for name, file in files.items()},
    )
    description.write(directory, described)


def _base_model(task: TrainingTask) -> BaseModelSource:
    """What adapters name as their base: that of `model.source` would not fit those of new tokens."""
    model = task.config.model
    if model.added_tokens:
        return BaseModelSource(source=str(task.base_model), revision=None)
    return BaseModelSource(source=model.source, revision=model.revision)


def describe_lora(
    lora: Lora, base_model: Path, modules: Sequence[str] | None = None, parameters: Sequence[str] = ()
) -> LoraDescription:
    """The adapters that training with the section `lora` of a run file gives a model.

    `modules`, `parameters`: the targets, where they depend on more than the model's type.
    """
    whole_config = read_config(base_model)
    model_config = of_language_model(whole_config)
    model_type = str(model_config.get("model_type", ""))
    family = family_of(model_type)
    scores = is_classifier(whole_config)
    task = "SEQ_CLS" if scores else "SEQ_2_SEQ_LM" if is_encoder_decoder(model_config) else "CAUSAL_LM"
    return LoraDescription.model_validate(
        lora.model_dump()
        | {
            "modules_to_save": (*lora.modules_to_save, *(["score"] if scores else ())),
            "target_modules": target_modules(lora, whole_config, modules),
            "target_parameters": parameters,
            "fan_in_fan_out": family is not None and family.transposed,
            "task": task,
        }
    )


def check_consolidable(
    trained: Mapping[str, Sequence[int]], lora: LoraDescription | None, base_model: Path, held: HeldParts
) -> None:
    """Raise UserError unless stage consolidate will find what it needs in a checkpoint, by names and shapes.

    `trained`: the shape of each parameter that is trained, by its name in checkpoints; `lora`: None with method full;
    `held`: as in held.json.
    """
    tensors = [LogicalTensor(name, "F32", tuple(shape), (_whole(shape),)) for name, shape in trained.items()]
    source = BaseModelSource(source="", revision=None)
    try:
        check_fit(of_engine(base_model, lora, source, tensors, held), base_model)
    except UserError as error:
        raise UserError(
            f"model.source: what this model's training saves could not be consolidated: {error.problem}",
            "set training.method to lora, and lora.target_modules to linear layers that transformers and the model's"
            " files name alike, such as those of attention",
        ) from error


def _whole(shape: Sequence[int]) -> Piece:
    """All of a tensor that is not stored anywhere."""
    return Piece(Path(), 0, (0,) * len(shape), tuple(shape), contiguous_strides(tuple(shape)))
