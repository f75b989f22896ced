"""The kind of a directory, by file names only, so that commands refuse a wrong path before any work begins."""

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from hyperpod_ft.checkpoint.adapters import lora_config
from hyperpod_ft.checkpoint.adapters.lora_config import WEIGHTS
from hyperpod_ft.checkpoint.sharded import dcp
from hyperpod_ft.checkpoint.sharded.nxd import reader
from hyperpod_ft.errors import UserError

Kind = Literal["sharded checkpoint", "adapter", "model", "file", "missing", "other"]

_ADAPTER_NAMES = (lora_config.CONFIG, WEIGHTS, "adapter_model.bin")
_MODEL_PATTERNS = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin")


def kind_of(path: Path) -> Kind:
    """A model's weights take precedence over shards, and shards over an adapter's configuration."""
    if not path.is_dir():
        return "file" if path.exists() else "missing"
    if any(True for pattern in _MODEL_PATTERNS for _ in path.glob(pattern)):
        return "model"
    if _is_sharded(path):
        return "sharded checkpoint"
    names = {child.name for child in path.iterdir()}
    return "adapter" if names & set(_ADAPTER_NAMES) else "other"


def expect(what: str, path: Path, *wanted: Kind) -> Kind:
    """The kind of `path`. Raises UserError unless it is one of `wanted`; `what`: its option on the command line."""
    kind = kind_of(path)
    if kind in wanted:
        return kind
    where = f"{what} {path}".strip()
    wish = " or ".join(f"{'an' if one == 'adapter' else 'a'} {one}" for one in wanted)
    if kind == "missing":
        raise UserError(
            f"{where}: no such directory", _download(path) if "model" in wanted else f"give the directory of {wish}"
        )
    if kind == "file":
        raise UserError(f"{where}: is a file, not a directory", f"give the directory of {wish}")
    if kind == "sharded checkpoint":
        raise UserError(f"{where}: is a sharded checkpoint", "run hyperpod-ft consolidate first")
    if kind == "other":
        if "sharded checkpoint" in wanted and (below := _checkpoints_below(path)):
            raise UserError(f"{where}: is not a checkpoint", f"did you mean {', '.join(below)}?")
        raise UserError(
            f"{where}: is not {wish}: it does not contain {_looked_for(wanted)}", f"give the directory of {wish}"
        )
    raise UserError(f"{where}: is {'an adapter' if kind == 'adapter' else 'a model'}, not {wish}", f"give {wish}")


def refuse_overlap(target: Path, inputs: Sequence[Path]) -> None:
    """Raise UserError when `target` is one of the inputs, is inside one, or contains one."""
    final = target.resolve()
    for path in inputs:
        given = path.resolve()
        if given == final or final in given.parents:
            raise UserError(f"{target}: would replace the input {path}", "choose another directory")
        if given in final.parents:
            raise UserError(f"{target}: is inside the input {path}", "choose another directory")


def refuse_unwritable(target: Path) -> None:
    """Raise UserError when `target` cannot be created."""
    final = target.absolute()
    above = next(parent for parent in final.parents if parent.exists())
    if not above.is_dir():
        raise UserError(f"{above}: is not a directory", "choose another directory with -o")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"{above}: is not writable", "choose another directory with -o")


def _is_sharded(path: Path) -> bool:
    if path.name == reader.ADAPTER_SHARDS or (path.name == reader.SHARDS and (path / "model").is_dir()):
        return True
    return (
        (path / dcp.INDEX).is_file()
        or any((path / name).is_dir() for name in (reader.SHARDS, reader.ADAPTER_SHARDS))
        or any(True for _ in path.glob(f"adapter_*/{reader.ADAPTER_SHARDS}"))
    )


def _checkpoints_below(path: Path) -> list[str]:
    found = [child for child in path.iterdir() if child.is_dir() and kind_of(child) == "sharded checkpoint"]
    return [child.name for child in sorted(found, key=lambda child: (len(child.name), child.name))]


def _download(path: Path) -> str:
    if path.is_absolute() or len(path.parts) != 2 or ".." in path.parts:
        return "give the directory of a model"
    return f"if it is a model's name on the Hub, download it first: hf download {path} --local-dir {path.name}"


def _looked_for(wanted: Collection[Kind]) -> str:
    names: dict[Kind, str] = {
        "sharded checkpoint": f"{reader.SHARDS}/ or adapter_*/{reader.ADAPTER_SHARDS}/ (optimum-neuron), or {dcp.INDEX}"
        " (torch.distributed.checkpoint)",
        "adapter": lora_config.CONFIG,
        "model": "model.safetensors or its index",
    }
    return ", or ".join(names[kind] for kind in wanted)
