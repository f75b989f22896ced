"""A sharded checkpoint, whoever wrote it: its adapters or its model as logical tensors. No data is read.

Two kinds are known: neuronx-distributed's as optimum-neuron writes them (nxd), and torch.distributed.checkpoint (dcp),
with engine torch's checkpoint.json or without.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hyperpod_ft import publish
from hyperpod_ft.checkpoint.adapters import peft_names
from hyperpod_ft.checkpoint.adapters.lora_config import AdapterConfig
from hyperpod_ft.checkpoint.formats.json_file import read_object
from hyperpod_ft.checkpoint.formats.torch_file import Archive
from hyperpod_ft.checkpoint.sharded import dcp
from hyperpod_ft.checkpoint.sharded.nxd import adapter_config, reader
from hyperpod_ft.checkpoint.tensors.layout import LogicalTensor
from hyperpod_ft.errors import UserError

# Written by engines/checkpoint_directory.py, whose docstring tells its keys and those of the tensors.
_DESCRIPTION = "checkpoint.json"
_PARAMETERS = "model."
# What other programs call the parameters' part of a state dict, seen by the first component of a model's own names.
_MODEL_NAMES = ("model.", "lm_head.", "base_model.", "transformer.")


@dataclass(frozen=True)
class ShardedAdapter:
    """One LoRA adapter: adapter_config.json and the tensors of adapter_model.safetensors, as PEFT has them."""

    name: str
    config: dict[str, Any]
    tensors: tuple[LogicalTensor, ...]


@dataclass(frozen=True)
class Sharded:
    """A checkpoint: adapters, or the whole model by Hugging Face's names.

    `files` is where config.json and tokenizer of a whole model lie, if the checkpoint has them. `archives` hold
    all of the tensors, each with checksums of its own.
    """

    directory: Path
    adapters: tuple[ShardedAdapter, ...]
    model: tuple[LogicalTensor, ...]
    files: Path | None
    archives: tuple[Archive, ...] = ()

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        """Of the model and every adapter."""
        return (*self.model, *(tensor for adapter in self.adapters for tensor in adapter.tensors))


def open_checkpoint(path: Path) -> Sharded:
    """The checkpoint at `path`: its directory, or the one below it that holds an adapter or the shards.

    Raises UserError when there is none, or it is incomplete, damaged or mixed with another.
    """
    path = path.absolute()
    if not path.is_dir():
        raise UserError(f"{path}: no such directory", "name the directory of a checkpoint")
    if (path / dcp.INDEX).is_file():
        found = _own(path) if (path / _DESCRIPTION).is_file() else _dcp(path)
        return _with_archives(found, dcp.archives(path))
    found = _nxd(path)
    return _with_archives(found, {Archive(piece.file) for tensor in found.tensors for piece in tensor.stored})


def _with_archives(checkpoint: Sharded, archives: Iterable[Archive]) -> Sharded:
    return replace(checkpoint, archives=tuple(sorted(archives, key=lambda archive: (archive.file, archive.offset))))


def _nxd(path: Path) -> Sharded:
    model = reader.model_directory(path)
    adapters = reader.adapter_directories(path)
    if model and adapters:
        raise UserError(f"{path}: holds both adapters and a whole model", "name the directory of one of them")
    if model:
        return Sharded(model, (), tuple(reader.read_model(model)), model if (model / "config.json").is_file() else None)
    if adapters:
        return Sharded(adapters[0].parent, tuple(_nxd_adapter(directory) for directory in adapters), (), None)
    raise UserError(
        f"{path}: is no sharded checkpoint: looked for {reader.SHARDS}/, adapter_*/{reader.ADAPTER_SHARDS}/"
        f" (optimum-neuron) and {dcp.INDEX} (torch.distributed.checkpoint)",
        "name the directory of a checkpoint",
    )


def _nxd_adapter(directory: Path) -> ShardedAdapter:
    config, tensors = reader.read_adapter(directory)
    return ShardedAdapter(reader.adapter_name(directory), config, tuple(tensors))


def _dcp(directory: Path) -> Sharded:
    tensors = _parameters(dcp.read(directory))
    if not any(".lora_" in tensor.name for tensor in tensors):
        return Sharded(directory, (), tensors, directory if (directory / "config.json").is_file() else None)
    # the scale of the update stands nowhere else
    config = adapter_config.read_config(directory / adapter_config.CONFIG)
    return _with_adapter(directory, config, [tensor for tensor in tensors if peft_names.is_trained(tensor.name)])


def _own(directory: Path) -> Sharded:
    """What engine torch wrote."""
    file = directory / _DESCRIPTION
    tensors = tuple(dcp.read(directory, _PARAMETERS))
    description = read_object(file, "use another checkpoint")
    try:
        if publish.sha256(directory / dcp.INDEX) != description["sha256"][dcp.INDEX]:
            raise UserError(f"{directory / dcp.INDEX}: is damaged: its digest is not the one recorded", "use another")
        if description["method"] == "full":
            return Sharded(directory, (), tensors, None)
        lora, base = description["lora"], description["base_model"]
        config = AdapterConfig(lora["r"], lora["alpha"], lora["rslora"], tuple(lora["target_modules"]))
        values = config.as_peft(base["source"], base["revision"], lora["dropout"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: does not describe a checkpoint: {error!r}", "use another checkpoint") from error
    if other := [tensor.name for tensor in tensors if not peft_names.is_trained(tensor.name)]:
        raise UserError(f"{directory}: tensor {other[0]} is no LoRA factor of the adapter `default`", "use another")
    return _with_adapter(directory, values, tensors)


def _with_adapter(directory: Path, config: dict[str, Any], tensors: Sequence[LogicalTensor]) -> Sharded:
    adapter = []
    for tensor in tensors:
        name = peft_names.saved_name(tensor.name, "default")
        if name is None:
            raise UserError(f"{directory}: tensor {tensor.name} is not of the adapter `default`", "save one adapter")
        adapter.append(tensor.renamed(name))
    return Sharded(directory, (ShardedAdapter("default", config, tuple(adapter)),), (), None)


def _parameters(tensors: Sequence[LogicalTensor]) -> tuple[LogicalTensor, ...]:
    """The parameters among tensors of a state dict that others wrote, by the model's own names."""
    nested = [
        tensor for tensor in tensors if tensor.name.startswith(tuple(_PARAMETERS + name for name in _MODEL_NAMES))
    ]
    if nested:
        return tuple(tensor.renamed(tensor.name.removeprefix(_PARAMETERS)) for tensor in nested)
    return tuple(tensor for tensor in tensors if tensor.name.startswith(_MODEL_NAMES))
