"""A sharded checkpoint of any known writer: its adapters or its model as logical tensors. No data is read.

Three kinds are known: neuronx-distributed's as optimum-neuron writes them (nxd); torch.distributed.checkpoint (dcp),
with engine torch's checkpoint.json or without; and engine trl's, whose weights are in files of PEFT or transformers.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hyperpod_ft import digests
from hyperpod_ft.checkpoint.adapters.lora_config import CONFIG, PREFIX, WEIGHTS, AdapterConfig, is_trained, saved_name
from hyperpod_ft.checkpoint.formats.safetensors_file import read_file, read_model
from hyperpod_ft.checkpoint.formats.torch_file import Archive
from hyperpod_ft.checkpoint.sharded import dcp, description
from hyperpod_ft.checkpoint.sharded.nxd import adapter_config, reader
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.errors import UserError

# The key of the parameters in a state dict; engines/checkpoint_directory.py lists all keys of the kit's own.
_PARAMETERS = "model."
# Of engine trl: files of weights, and accelerate's directory of those that ranks shard.
_WEIGHT_FILES = (".safetensors", ".safetensors.index.json", dcp.INDEX)
_SHARDS = "pytorch_model_fsdp_0"
# How the names of a model's own parameters begin.
_MODEL_NAMES = ("model.", "lm_head.", "base_model.", "transformer.", "shared.", "encoder.", "decoder.")


@dataclass(frozen=True)
class ShardedAdapter:
    """One LoRA adapter: adapter_config.json and the tensors of adapter_model.safetensors, as PEFT writes them."""

    name: str
    config: dict[str, Any]
    tensors: tuple[LogicalTensor, ...]


@dataclass(frozen=True)
class ShardedCheckpoint:
    """A checkpoint: adapters, or the whole model by Hugging Face's names.

    `files`: the directory of a whole model's config.json and tokenizer, if the checkpoint has them. `archives`: the
    files of the tensors, with checksums. `left`: the base's tensors that training leaves as they are.
    """

    directory: Path
    adapters: tuple[ShardedAdapter, ...]
    model: tuple[LogicalTensor, ...]
    files: Path | None
    archives: tuple[Archive, ...] = ()
    left: frozenset[str] = frozenset()

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        """The tensors of the model and of every adapter."""
        return (*self.model, *(tensor for adapter in self.adapters for tensor in adapter.tensors))


def open_checkpoint(path: Path) -> ShardedCheckpoint:
    """The checkpoint at `path`: its directory, or the one below it that holds an adapter or the shards.

    Raises UserError when there is none, or it is incomplete, damaged or a mixture of several.
    """
    path = path.absolute()
    if not path.is_dir():
        raise UserError(f"{path}: no such directory", "give the directory of a checkpoint")
    if (path / dcp.INDEX).is_file():
        is_own = (path / description.NAME).is_file()
        tensors, archives = dcp.read(path, _PARAMETERS if is_own else "")
        return _with_archives(_own(path, tensors) if is_own else _dcp(path, tensors), archives)
    if (path / description.NAME).is_file() and description.read(path).engine == "trl":
        return _trl(path)
    found = _nxd(path)
    return _with_archives(found, {Archive(piece.file) for tensor in found.tensors for piece in tensor.stored})


def _with_archives(checkpoint: ShardedCheckpoint, archives: Iterable[Archive]) -> ShardedCheckpoint:
    return replace(checkpoint, archives=tuple(sorted(archives, key=lambda archive: (archive.file, archive.offset))))


def _nxd(path: Path) -> ShardedCheckpoint:
    model = reader.model_directory(path)
    adapters = reader.adapter_directories(path)
    if model and adapters:
        raise UserError(f"{path}: has both adapters and a whole model", "give the directory of one of them")
    if model:
        return ShardedCheckpoint(
            model, (), tuple(reader.read_model(model)), model if (model / "config.json").is_file() else None
        )
    if adapters:
        return ShardedCheckpoint(adapters[0].parent, tuple(_nxd_adapter(directory) for directory in adapters), (), None)
    raise UserError(
        f"{path}: is not a sharded checkpoint: looked for {reader.SHARDS}/, adapter_*/{reader.ADAPTER_SHARDS}/"
        f" (optimum-neuron) and {dcp.INDEX} (torch.distributed.checkpoint)",
        "give the directory of a checkpoint",
    )


def _nxd_adapter(directory: Path) -> ShardedAdapter:
    config, tensors = reader.read_adapter(directory)
    return ShardedAdapter(reader.adapter_name(directory), config, tuple(tensors))


def _dcp(directory: Path, stored: Sequence[LogicalTensor]) -> ShardedCheckpoint:
    tensors = _parameters(stored)
    if not any(".lora_" in tensor.name for tensor in tensors):
        return ShardedCheckpoint(directory, (), tensors, directory if (directory / "config.json").is_file() else None)
    # only this file has the scale of the update
    values, _ = adapter_config.read_config(directory / CONFIG)
    return _with_adapter(directory, values, [tensor for tensor in tensors if is_trained(tensor.name)])


def _own(directory: Path, tensors: Sequence[LogicalTensor]) -> ShardedCheckpoint:
    """What engine torch wrote."""
    described = description.read(directory)
    has_held = description.HELD in described.files
    for name in (dcp.INDEX, *([description.HELD] if has_held else [])):
        if not (directory / name).is_file():
            raise UserError(f"{directory / name}: is missing", description.INCOMPLETE)
        if digests.file_sha256(directory / name) != described.sha256.get(name):
            raise UserError(
                f"{directory / name}: is damaged: its SHA-256 differs from the one in {description.NAME}",
                "use an earlier checkpoint",
            )
    held = description.read_held(directory) if has_held else {}
    return of_engine(directory, described.lora, described.base_model, tensors, held)


def _trl(directory: Path) -> ShardedCheckpoint:
    """What TRL's trainer wrote: an adapter as PEFT saves it, the model as transformers does, or accelerate's shards."""
    described, archives = description.read(directory), list[Archive]()
    weights = {name: digest for name, digest in described.sha256.items() if name.endswith(_WEIGHT_FILES)}
    if reason := description.why_damaged(directory, weights):
        raise UserError(f"{directory}: {reason}", "use an earlier checkpoint")
    if (directory / _SHARDS / dcp.INDEX).is_file():
        tensors, archives = dcp.read(directory / _SHARDS, _PARAMETERS)
    else:
        tensors = read_file(directory / WEIGHTS) if described.lora else read_model(directory)
    named = [tensor.renamed(tensor.name.removeprefix(PREFIX)) for tensor in tensors]
    return _with_archives(of_engine(directory, described.lora, described.base_model, named, {}), archives)


def of_engine(
    directory: Path,
    lora: description.LoraDescription | None,
    base: description.BaseModelSource,
    tensors: Sequence[LogicalTensor],
    held: description.HeldParts,
) -> ShardedCheckpoint:
    """A checkpoint of an engine of the kit with these trained parameters, by engine torch's names.

    Raises UserError when one is not the adapter's.
    """
    if lora is None:
        left = frozenset(name for name, parts in held.items() if not parts)
        return ShardedCheckpoint(directory, (), tuple(_as_in_files(tensors, held)), None, left=left)
    config = AdapterConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        target_modules=lora.target_modules,
        target_parameters=lora.target_parameters,
        modules_to_save=lora.modules_to_save,
    )
    others = (tensor.name for tensor in tensors if ".lora_" not in tensor.name)
    if other := [name for name in others if not config.saves(name.rpartition(".")[0])]:
        raise UserError(f"{directory}: tensor {other[0]} is not one of a LoRA adapter", "use an earlier checkpoint")
    # engine torch's names are those in PEFT's files but for this prefix
    named = tuple(tensor.renamed(PREFIX + tensor.name) for tensor in tensors)
    values = config.as_peft(base.source, base.revision, lora.dropout, lora.task, lora.fan_in_fan_out)
    return ShardedCheckpoint(directory, (ShardedAdapter("default", values, named),), (), None)


def _as_in_files(tensors: Sequence[LogicalTensor], held: description.HeldParts) -> Iterator[LogicalTensor]:
    """The tensors under the names and in the form of the base model's files."""
    holders = {part.tensor for parts in held.values() for part in parts}
    by_name = {tensor.name: tensor for tensor in tensors}
    yield from (tensor for tensor in tensors if tensor.name not in holders)
    for name, parts in held.items():
        if parts and all(part.tensor in by_name for part in parts):
            boxes = [
                by_name[part.tensor].part(part.start, part.shape).with_axes(part.axes).moved(part.at) for part in parts
            ]
            shape = tuple(max(sizes) for sizes in zip(*(box.shape for box in boxes), strict=True))
            pieces = tuple(piece for box in boxes for piece in box.pieces)
            yield LogicalTensor(name, boxes[0].dtype, shape, pieces)


def _with_adapter(directory: Path, config: dict[str, Any], tensors: Sequence[LogicalTensor]) -> ShardedCheckpoint:
    adapter = []
    for tensor in tensors:
        name = saved_name(tensor.name, "default")
        if name is None:
            raise UserError(
                f"{directory}: tensor {tensor.name} does not belong to the adapter `default`", "save one adapter"
            )
        adapter.append(tensor.renamed(name))
    return ShardedCheckpoint(directory, (ShardedAdapter("default", config, tuple(adapter)),), (), None)


def _parameters(tensors: Sequence[LogicalTensor]) -> tuple[LogicalTensor, ...]:
    """The parameters among tensors of a state dict that others wrote, by the model's own names."""
    nested = [
        tensor for tensor in tensors if tensor.name.startswith(tuple(_PARAMETERS + name for name in _MODEL_NAMES))
    ]
    if nested:
        return tuple(tensor.renamed(tensor.name.removeprefix(_PARAMETERS)) for tensor in nested)
    return tuple(tensor for tensor in tensors if tensor.name.startswith(_MODEL_NAMES))
