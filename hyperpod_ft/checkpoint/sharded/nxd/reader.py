"""Reader of optimum-neuron's sharded checkpoints, which neuronx-distributed writes.

    checkpoint-400/
        trainer_state.json
        shards/                         full-parameter training; next to config.json, trn_config.json, tokenizer
        adapter_default/                LoRA; one directory per adapter
            adapter_config.json
            adapter_shards/
                checkpoint, done        written first and last; with `async_save`, `done` may be written early and
                                        proves nothing alone
                mp_metadata_pp_rank_0.json ...          see metadata
                model/dp_rank_00_tp_rank_00_pp_rank_00.pt ...   see rank_files
                optim/                  not read

(optimum-neuron 0.4.5, models/training/modeling_utils.py and peft/peft_model.py, `save_pretrained`; neuronx_distributed
0.15, trainer/checkpoint.py, `save_checkpoint`.) transformations.py has how tensors are fused and permuted.

Files of two steps of one training look alike: they do not name the step. What can be detected is refused: a step in
trainer_state.json that differs from the directory's name, tensor files that no rank refers to, dtypes and shapes that
differ between ranks or from the index. Tensors that ranks share also differ between steps: `consolidate` compares them.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from hyperpod_ft.checkpoint.adapters.lora_config import CONFIG, is_frozen_base, is_trained, original_name, saved_name
from hyperpod_ft.checkpoint.formats.json_file import read_object
from hyperpod_ft.checkpoint.sharded.description import INCOMPLETE, MIXED
from hyperpod_ft.checkpoint.sharded.nxd import adapter_config, metadata, rank_files
from hyperpod_ft.checkpoint.sharded.nxd.metadata import FusedLinears, GroupedQueries, PipelineStage
from hyperpod_ft.checkpoint.sharded.nxd.rank_files import RankFile
from hyperpod_ft.checkpoint.sharded.nxd.transformations import logical
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor, check
from hyperpod_ft.errors import UserError

SHARDS = "shards"
ADAPTER_SHARDS = "adapter_shards"
_ADAPTER = "adapter_"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


def model_directory(path: Path) -> Path | None:
    """The directory above the shards of a full-parameter checkpoint at `path`; None when there are none."""
    if path.name == SHARDS and (path / "model").is_dir():
        return path.parent
    return path if (path / SHARDS).is_dir() else None


# It becomes the name of a directory, and must not collide with the names of a model's files.
_ADAPTER_NAME = re.compile(r"(?!adapter_)[A-Za-z0-9_][A-Za-z0-9_.-]*")


def adapter_directories(path: Path) -> list[Path]:
    """The directory of each adapter of a LoRA checkpoint at `path`, `adapter_default` first; empty if there are none.

    Raises UserError when one of several has no shards.
    """
    for directory in (path, path.parent):
        if directory.name.startswith(_ADAPTER) and (directory / ADAPTER_SHARDS).is_dir():
            return [directory]
    found = sorted(child for child in path.glob(_ADAPTER + "*") if child.is_dir())
    if not any((child / ADAPTER_SHARDS).is_dir() for child in found):
        return []
    if odd := [child for child in found if not _ADAPTER_NAME.fullmatch(adapter_name(child))]:
        raise UserError(
            f"{odd[0]}: is not a valid adapter name", "rename it: use letters, digits, dashes, dots and underscores"
        )
    if bare := [child for child in found if not (child / ADAPTER_SHARDS).is_dir()]:
        raise UserError(f"{bare[0]}: {ADAPTER_SHARDS} is missing", INCOMPLETE)
    return sorted(found, key=lambda child: adapter_name(child) != "default")


def adapter_name(directory: Path) -> str:
    return directory.name.removeprefix(_ADAPTER)


def read_model(directory: Path) -> list[LogicalTensor]:
    """Every tensor of a full-parameter checkpoint, by Hugging Face's names.

    Raises UserError when anything is missing, damaged, or contradicts the rest.
    """
    check_step(directory)
    stages, tensor_parallel = _stages(directory / SHARDS)
    _check_degrees(directory / "trn_config.json", tensor_parallel, len(stages))
    return _read(directory / SHARDS, stages, tensor_parallel, None)


def read_adapter(directory: Path) -> tuple[dict[str, Any], list[LogicalTensor]]:
    """adapter_config.json and every tensor of an adapter, both as PEFT writes them.

    Raises UserError when anything is missing, damaged, or contradicts the rest.
    """
    check_step(directory.parent)
    file = directory / CONFIG
    values, config = adapter_config.read_config(file)
    stages, tensor_parallel = _stages(directory / ADAPTER_SHARDS)
    tensors = _read(directory / ADAPTER_SHARDS, stages, tensor_parallel, adapter_name(directory))
    trained_as = {
        linear: module
        for stage in stages
        for module, transformation in stage.transformations.items()
        if isinstance(transformation, FusedLinears | GroupedQueries)
        for linear in transformation.linears
    }
    return adapter_config.fitted_config(file, values, config, tensors, trained_as), tensors


def check_step(directory: Path) -> None:
    """Raise UserError when the step in trainer_state.json differs from the directory's name."""
    match = _CHECKPOINT.fullmatch(directory.name)
    file = directory / "trainer_state.json"
    if match is None or not file.is_file():
        return
    step = read_object(file, "use an earlier checkpoint").get("global_step")
    if step != int(match[1]):
        raise UserError(f"{file}: global_step is {step}, but the directory is named for step {match[1]}", MIXED)


def _stages(shards: Path) -> tuple[list[PipelineStage], int]:
    if not (shards / "done").is_file():
        raise UserError(f"{shards}: the file `done` is missing: the checkpoint is incomplete", "use an earlier one")
    return metadata.read_stages(shards)


def _check_degrees(file: Path, tensor_parallel: int, pipeline_parallel: int) -> None:
    """Compare the degrees with trn_config.json, which alone reveals that the last stage is missing altogether."""
    if not file.is_file():
        return
    values = read_object(file, "use an earlier checkpoint")
    found = {"tensor_parallel_size": tensor_parallel, "pipeline_parallel_size": pipeline_parallel}
    for key, degree in found.items():
        if values.get(key, degree) != degree:
            raise UserError(f"{file}: {key} is {values[key]}, the shards have {degree}", INCOMPLETE)


def _read(
    shards: Path, stages: Sequence[PipelineStage], tensor_parallel: int, adapter: str | None
) -> list[LogicalTensor]:
    files = rank_files.find(shards / "model", tensor_parallel, len(stages))
    saved = [_saved_parameters(stage, adapter) for stage in stages]
    everywhere = {name: dim for parameters in saved for name, dim in parameters.items()}
    live = {name for stage in stages for name in stage.parameters}
    found: dict[str, LogicalTensor] = {}
    for stage, parameters, row in zip(stages, saved, files, strict=True):
        ranks = rank_files.read_all(row)
        names = [name for name in _names(ranks) if adapter is None or not is_frozen_base(name)]
        if missing := [name for name in _needed(stage, adapter) if name not in names]:
            raise UserError(f"{row[0]}: {missing[0]} is missing", INCOMPLETE)
        described = {name: name for name in names if name in parameters}
        for name in names:
            # files also have tensors of other stages, and of other adapters, whose values are meaningless here
            if name not in everywhere and name not in live:
                tied = _tied_to(row[0], name, everywhere)
                # the stages of the embedding and the output layer have the trained values; others may not
                described |= {name: tied} if tied in parameters or stage is stages[-1] else {}
        for name, parts in rank_files.shards(ranks, described).items():
            known = described[name]
            for tensor in logical(stage.file, name, parts, everywhere[known], stage.transformations):
                final = tensor if name == known else tensor.renamed(known)
                found[final.name] = _with_copy(row[0], found[final.name], final) if final.name in found else final
    tensors = list(found.values())
    check(tensors, shards)
    return tensors


def _saved_parameters(stage: PipelineStage, adapter: str | None) -> dict[str, int | None]:
    """The parameters of a stage by their names in files, and the dimension along which each is sharded."""
    if adapter is None:
        return dict(stage.parameters)
    saved = {}
    for live, dim in stage.parameters.items():
        if (name := saved_name(live, adapter)) is not None:
            # the copy of a module for modules_to_save is not marked as sharded
            saved[name] = stage.parameters.get(original_name(live), dim) if dim is None else dim
    return saved


def _needed(stage: PipelineStage, adapter: str | None) -> Iterator[str]:
    """The names that a stage's files must have: all, or with LoRA those of the adapter."""
    for live in stage.parameters:
        if adapter is None:
            yield live
        elif is_trained(live) and (name := saved_name(live, adapter)) is not None:
            yield name


def _names(ranks: Sequence[RankFile]) -> list[str]:
    """The names that every rank of a stage has saved."""
    first, *others = ranks
    for other in others:
        if different := sorted(first.contents.keys() ^ other.contents.keys()):
            has, lacks = (first, other) if different[0] in first.contents else (other, first)
            raise UserError(
                f"{lacks.file}: {different[0]} is missing, {has.file.name} has it",
                MIXED,
            )
    return list(first.contents)


def _tied_to(file: Path, name: str, described: Collection[str]) -> str:
    """The described name of the parameter that an undescribed one is tied to.

    Metadata names a parameter once (`named_parameters`), files under each of its names (`state_dict`).
    """
    embedding = name.removesuffix(_OUTPUT) + _EMBEDDING
    if not name.endswith(_OUTPUT) or embedding not in described:
        raise UserError(
            f"{file}: no metadata describes {name}",
            f"a pipeline stage's metadata is missing, or {MIXED}",
        )
    return embedding


def _with_copy(file: Path, tensor: LogicalTensor, copy: LogicalTensor) -> LogicalTensor:
    """`tensor` with a second copy, from another stage or under a tied name, among its replicas."""
    if (tensor.dtype, tensor.shape) != (copy.dtype, copy.shape):
        raise UserError(
            f"{file}: {tensor.name} is {copy.dtype} {list(copy.shape)}, elsewhere {tensor.dtype} {list(tensor.shape)}",
            MIXED,
        )
    return LogicalTensor(
        tensor.name, tensor.dtype, tensor.shape, tensor.pieces, (*tensor.replicas, *copy.pieces, *copy.replicas)
    )
