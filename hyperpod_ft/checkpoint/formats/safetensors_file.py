"""Reader of safetensors: one file, or a Hugging Face model directory with or without an index.

The format: 8 bytes little-endian header length, that many bytes of JSON, then the tensors' bytes, row-major, without
gaps, to the end of the file (https://huggingface.co/docs/safetensors, "Format"). What does not keep to it is refused.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperpod_ft.checkpoint.formats.json_file import parse_object, read_object
from hyperpod_ft.checkpoint.tensors.layout import DTYPE_BYTES, LogicalTensor, Piece, contiguous_strides
from hyperpod_ft.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_REMEDY = "make or download it again"


@dataclass(frozen=True)
class Index:
    """What `model.safetensors.index.json` tells: the file of each tensor, and the bytes of all tensors if it does."""

    weight_map: Mapping[str, str]
    total_size: object = None

    @property
    def files(self) -> list[str]:
        return sorted(set(self.weight_map.values()))

    def disagreements(self, held: Mapping[str, Sequence[LogicalTensor]]) -> Iterator[str]:
        """A line for each tensor that does not lie where the index says; `held`: the tensors of each file, by name.

        Tensors whose named file is not in `held` are left out.
        """
        place: dict[str, str] = {}
        for file, tensors in held.items():
            for tensor in tensors:
                if tensor.name in place:
                    yield f"tensor {tensor.name} is in {place[tensor.name]} and in {file}"
                elif tensor.name not in self.weight_map:
                    yield f"tensor {tensor.name} of {file} is not named"
                elif self.weight_map[tensor.name] != file:
                    yield f"tensor {tensor.name} is in {file}, not in {self.weight_map[tensor.name]}"
                place[tensor.name] = file
        for name, file in self.weight_map.items():
            if file in held and name not in place:
                yield f"tensor {name} is not in {file}"


def read_model(directory: Path) -> list[LogicalTensor]:
    """Every tensor of a model directory, file by file in the order of their bytes.

    Raises UserError when there are no safetensors weights, a file is missing or damaged, or the index and the files
    disagree.
    """
    index = read_index(directory)
    if index is None:
        return read_file(directory / SINGLE)
    held = {name: read_file(directory / name) for name in index.files}
    for line in index.disagreements(held):
        raise UserError(f"{directory / INDEX}: does not match its files: {line}", "download it again")
    return [tensor for tensors in held.values() for tensor in tensors]


def read_index(directory: Path) -> Index | None:
    """The index of a model directory; None when all its weights are in one file.

    Raises UserError when the index is damaged, names files outside the directory, or there are no safetensors weights.
    """
    file = directory / INDEX
    if not file.is_file():
        if not (directory / SINGLE).is_file():
            raise UserError(
                f"{directory}: holds neither {SINGLE} nor {INDEX}", "convert the model to safetensors (save_pretrained)"
            )
        return None
    values = read_object(file, _REMEDY)
    weight_map, metadata = values.get("weight_map"), values.get("metadata")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UserError(f"{file}: has no weight_map", "download the model again")
    index = Index(weight_map, metadata.get("total_size") if isinstance(metadata, dict) else None)
    if outside := [name for name in index.files if Path(name).name != name or "\0" in name]:
        raise UserError(f"{file}: names a file outside its directory: {outside[0]}", "do not trust it")
    return index


def read_file(file: Path) -> list[LogicalTensor]:
    """Every tensor of one file, in the order of their bytes. Raises UserError when it is missing or damaged."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if length > _MAX_HEADER_BYTES or size < 8:
                raise UserError(f"{file}: is no safetensors file", f"it is damaged: {_REMEDY}")
            if 8 + length > size:
                raise UserError(f"{file}: is truncated: {size} bytes, its header ends at {8 + length}", _REMEDY)
            text = stream.read(length)
    except FileNotFoundError as error:
        raise UserError(f"{file}: is missing", _REMEDY) from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}", "restore the file") from error
    header = parse_object(file, text, _REMEDY)
    try:
        _check_metadata(header.pop("__metadata__", {}))
        tensors = [_tensor(file, name, entry, 8 + length) for name, entry in header.items()]
        # an empty tensor comes before the one that begins where it does
        tensors.sort(key=lambda tensor: (tensor.pieces[0].offset, tensor.nbytes))
        end = _end(tensors, 8 + length)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: its header is damaged: {error!r}", _REMEDY) from error
    if end > size:
        raise UserError(f"{file}: is truncated: {size} bytes, its tensors end at {end}", _REMEDY)
    if end < size:
        raise UserError(f"{file}: {size - end} bytes follow its tensors", _REMEDY)
    return tensors


def _check_metadata(values: Any) -> None:
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise ValueError("__metadata__ holds more than strings")


def _tensor(file: Path, name: str, entry: Any, data: int) -> LogicalTensor:
    if entry["dtype"] not in DTYPE_BYTES:
        raise UserError(f"{file}: tensor {name} has dtype {entry['dtype']}", "this kit does not know it")
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
        raise ValueError(f"{name}: shape and data_offsets are no natural numbers")
    piece = Piece(file, data + begin, (0,) * len(shape), shape, contiguous_strides(shape))
    tensor = LogicalTensor(name, entry["dtype"], shape, (piece,))
    if end - begin != tensor.nbytes:
        raise ValueError(f"{name}: data_offsets and shape disagree")
    return tensor


def _end(tensors: Sequence[LogicalTensor], begin: int) -> int:
    """Where the last tensor ends; each has to begin where the one before ends."""
    for tensor in tensors:
        if (offset := tensor.pieces[0].offset) != begin:
            raise ValueError(
                f"{tensor.name}: {'a gap lies before' if offset > begin else 'overlaps the tensor before'}"
            )
        begin += tensor.nbytes
    return begin
