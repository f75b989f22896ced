"""Where a neuronx-distributed checkpoint stores each rank's part of a tensor, from its files' indices alone.

`model/dp_rank_00_tp_rank_TT_pp_rank_PP.pt` is what torch.save makes of a rank's state dict. With `use_xser` its values
are references instead, by number, to `<that name>.tensors/tensor_N.pt`, which hold one tensor each, and
`<that name>.info.pt` has the dtype and shape of each number. Ranks of one data parallel group share out who writes
which tensor file, but all write into the folder of data parallel rank 0 (neuronx_distributed 0.15,
trainer/checkpoint.py: `_get_path`, `_xser_save_data`, `_save`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperpod_ft.checkpoint.formats import safe_pickle, torch_file
from hyperpod_ft.checkpoint.formats.safe_pickle import Inert
from hyperpod_ft.checkpoint.formats.torch_file import StoredTensor
from hyperpod_ft.checkpoint.sharded.description import DAMAGED_FILE, INCOMPLETE, MIXED
from hyperpod_ft.checkpoint.tensors.logical_tensor import DTYPE_OF_TORCH_NAME
from hyperpod_ft.errors import UserError

# At least two digits: rank 100 has three, so names do not sort like numbers.
_RANK_FILE = re.compile(r"dp_rank_00_tp_rank_(\d{2,})_pp_rank_(\d{2,})\.pt")
_TENSOR_FILE = re.compile(r"tensor_\d+\.pt")
# More than CPUs: reading an index is mostly waiting for the volume.
_THREADS = 16


class _Reference(Inert):
    """A tensor in a separate file; its state is {"tid": number}."""


_NAMES: safe_pickle.Names = {("torch_xla.utils.serialization", "TensorReference"): _Reference}
_INFO_NAMES: safe_pickle.Names = {
    ("torch", "Size"): tuple,
    **{("torch", name): dtype for name, dtype in DTYPE_OF_TORCH_NAME.items()},
}


@dataclass(frozen=True)
class Shard:
    """One rank's part of a tensor."""

    file: Path
    tensor: StoredTensor


@dataclass(frozen=True)
class RankFile:
    """What one rank saved: each name's tensor, or the number of the file that holds it."""

    file: Path
    contents: Mapping[str, StoredTensor | int]
    info: Mapping[int, tuple[str, tuple[int, ...]]]  # dtype and shape by number

    def shard(self, name: str) -> Shard:
        """Raises UserError when the tensor's own file is damaged, or differs from this file."""
        found = self.contents[name]
        if isinstance(found, StoredTensor):
            return Shard(self.file, found)
        file = tensors_directory(self.file) / f"tensor_{found}.pt"
        tensor = torch_file.describe(file)
        if not isinstance(tensor, StoredTensor):
            raise UserError(f"{file}: does not hold a tensor", DAMAGED_FILE)
        if (tensor.dtype, tensor.shape) != self.info[found]:
            dtype, shape = self.info[found]
            raise UserError(
                f"{file}: holds {tensor.dtype} {list(tensor.shape)}, {info_file(self.file).name} says {dtype}"
                f" {list(shape)} for {name}",
                MIXED,
            )
        return Shard(file, tensor)


def tensors_directory(file: Path) -> Path:
    return file.with_name(file.name + ".tensors")


def info_file(file: Path) -> Path:
    return file.with_name(file.name + ".info.pt")


def find(model: Path, tensor_parallel: int, pipeline_parallel: int) -> list[list[Path]]:
    """The ranks' files by pipeline and tensor parallel rank. Raises UserError when one is missing or extra."""
    found = {}
    for file in sorted(model.glob("dp_rank_*.pt")):
        if file.name.endswith(".info.pt"):
            continue
        match = _RANK_FILE.fullmatch(file.name)
        if match is None:
            raise UserError(
                f"{file}: is not the file of a tensor and pipeline parallel rank",
                "checkpoints with expert or context parallelism cannot be read",
            )
        found[int(match[2]), int(match[1])] = file
    expected = {(stage, rank) for stage in range(pipeline_parallel) for rank in range(tensor_parallel)}
    degrees = f"tensor parallel {tensor_parallel} x pipeline parallel {pipeline_parallel}"
    if missing := sorted(expected - found.keys()):
        stage, rank = missing[0]
        name = f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt"
        raise UserError(f"{model / name}: is missing: the metadata says {degrees}", INCOMPLETE)
    if extra := sorted(found.keys() - expected):
        raise UserError(
            f"{found[extra[0]]}: does not belong to the checkpoint: the metadata says {degrees}",
            MIXED,
        )
    return [[found[stage, rank] for rank in range(tensor_parallel)] for stage in range(pipeline_parallel)]


def read(file: Path) -> RankFile:
    """Read one rank's file. Raises UserError when it is damaged, or does not name exactly its tensor files."""
    contents = torch_file.describe(file, names=_NAMES)
    if not isinstance(contents, dict) or not all(isinstance(name, str) for name in contents):
        raise UserError(f"{file}: does not hold a state dict", DAMAGED_FILE)
    numbers = {name: value.state["tid"] for name, value in contents.items() if _is_reference(value)}
    if not numbers:
        if other := [name for name, value in contents.items() if not isinstance(value, StoredTensor)]:
            raise UserError(f"{file}: {other[0]} is not a tensor", DAMAGED_FILE)
        if tensors_directory(file).is_dir():
            raise UserError(
                f"{tensors_directory(file)}: {file.name} refers to no tensor file",
                MIXED,
            )
        return RankFile(file, contents, {})
    if len(numbers) != len(contents):
        raise UserError(f"{file}: {min(contents.keys() - numbers.keys())} is not a tensor", DAMAGED_FILE)
    info = _info(info_file(file))
    if set(numbers.values()) != info.keys():
        raise UserError(
            f"{info_file(file)}: describes {len(info)} tensors, {file.name} refers to {len(set(numbers.values()))}",
            MIXED,
        )
    _check_tensor_files(tensors_directory(file), set(info))
    return RankFile(file, numbers, info)


def read_all(files: Sequence[Path]) -> list[RankFile]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(read, files))


def shards(ranks: Sequence[RankFile], names: Iterable[str]) -> dict[str, tuple[Shard, ...]]:
    """The parts of each name, by rank. Raises UserError like `RankFile.shard`, or when dtypes or shapes differ."""
    wanted = list(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda pair: pair[1].shard(pair[0]), [(name, rank) for name in wanted for rank in ranks])
        parts = {name: tuple(next(found) for _ in ranks) for name in wanted}
    for name, (first, *others) in parts.items():
        for other in others:
            if (other.tensor.dtype, other.tensor.shape) != (first.tensor.dtype, first.tensor.shape):
                raise UserError(
                    f"{other.file}: {name} is {other.tensor.dtype} {list(other.tensor.shape)}, rank 0 has"
                    f" {first.tensor.dtype} {list(first.tensor.shape)}",
                    MIXED,
                )
    return parts


def _is_reference(value: Any) -> bool:
    return isinstance(value, _Reference) and isinstance(value.state, dict) and isinstance(value.state.get("tid"), int)


def _info(file: Path) -> dict[int, tuple[str, tuple[int, ...]]]:
    found = torch_file.describe(file, names=_INFO_NAMES)
    try:
        return {int(number): (str(entry["dtype"]), tuple(entry["shape"])) for number, entry in found.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: does not describe tensors: {error!r}", DAMAGED_FILE) from error


def _check_tensor_files(directory: Path, numbers: set[int]) -> None:
    expected = {f"tensor_{number}.pt" for number in numbers}
    found = {path.name for path in directory.glob("tensor_*.pt") if _TENSOR_FILE.fullmatch(path.name)}
    if missing := sorted(expected - found):
        raise UserError(f"{directory / missing[0]}: is missing", INCOMPLETE)
    if extra := sorted(found - expected):
        raise UserError(
            f"{directory / extra[0]}: no rank refers to it: an earlier checkpoint left it",
            MIXED,
        )
