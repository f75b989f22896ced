"""Reader of safetensors: one file, or a Hugging Face model directory with or without an index.

The format: 8 bytes little-endian header length, that many bytes of JSON, then the tensors' bytes, row-major, without
gaps, to the end of the file (https://huggingface.co/docs/safetensors, "Format"). Anything else is refused.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from hyperpod_ft.checkpoint.formats.json_file import parse_object, read, validate
from hyperpod_ft.checkpoint.tensors.logical_tensor import DTYPE_BYTES, LogicalTensor, Piece, contiguous_strides
from hyperpod_ft.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_REMEDY = "write or download the file again"


class Index(BaseModel):
    """`model.safetensors.index.json`: the file of each tensor, and usually the bytes of all tensors."""

    model_config = ConfigDict(frozen=True)

    weight_map: Mapping[str, str]
    metadata: Any = None

    @property
    def total_size(self) -> object:
        return self.metadata.get("total_size") if isinstance(self.metadata, dict) else None

    @property
    def files(self) -> list[str]:
        return sorted(set(self.weight_map.values()))

    def disagreements(self, held: Mapping[str, Sequence[LogicalTensor]]) -> Iterator[str]:
        """A line for each tensor that is not where the index says; `held`: the tensors of each file, by file name.

        Skips tensors whose file is not in `held`.
        """
        place: dict[str, str] = {}
        for file, tensors in held.items():
            for tensor in tensors:
                if tensor.name in place:
                    yield f"tensor {tensor.name} is in {place[tensor.name]} and in {file}"
                elif tensor.name not in self.weight_map:
                    yield f"tensor {tensor.name} of {file} is not in the index"
                elif self.weight_map[tensor.name] != file:
                    yield f"tensor {tensor.name} is in {file}, not in {self.weight_map[tensor.name]}"
                place[tensor.name] = file
        for name, file in self.weight_map.items():
            if file in held and name not in place:
                yield f"tensor {name} is not in {file}"


_Natural = Annotated[int, Field(strict=True, ge=0)]


class _Entry(BaseModel):
    dtype: str
    shape: tuple[_Natural, ...]
    data_offsets: tuple[_Natural, _Natural]


class _Header(BaseModel):
    metadata: dict[str, str]
    tensors: dict[str, _Entry]


def has_weights(directory: Path) -> bool:
    """Whether there is a model to read."""
    return any((directory / name).is_file() for name in (INDEX, SINGLE))


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
        raise UserError(f"{directory / INDEX}: does not match its files: {line}", _REMEDY)
    return [tensor for tensors in held.values() for tensor in tensors]


def read_index(directory: Path) -> Index | None:
    """The index of a model directory; None if all weights are in one file.

    Raises UserError when the index is damaged, names files outside the directory, or there are no safetensors weights.
    """
    file = directory / INDEX
    if not file.is_file():
        if not (directory / SINGLE).is_file():
            raise UserError(
                f"{directory}: has neither {SINGLE} nor {INDEX}", "convert the model to safetensors (save_pretrained)"
            )
        return None
    index = read(file, Index, _REMEDY)
    if not index.files:
        raise UserError(f"{file}: names no file", _REMEDY)
    if outside := [name for name in index.files if Path(name).name != name or "\0" in name]:
        raise UserError(
            f"{file}: names a file outside its directory: {outside[0]}",
            "do not use the model unless you trust its source",
        )
    return index


def read_file(file: Path) -> list[LogicalTensor]:
    """Every tensor of one file, in the order of their bytes. Raises UserError when it is missing or damaged."""
    header, begin, size = _read_header(file)
    tensors = [_tensor(file, name, entry, begin) for name, entry in header.tensors.items()]
    # an empty tensor comes before the one that begins where it does
    tensors.sort(key=lambda tensor: (tensor.pieces[0].offset, tensor.nbytes))
    end = _end(file, tensors, begin)
    if end > size:
        raise UserError(f"{file}: is truncated: {size} bytes, its tensors end at {end}", _REMEDY)
    if end < size:
        raise UserError(f"{file}: {size - end} bytes follow the last tensor", _REMEDY)
    return tensors


def read_metadata(file: Path) -> dict[str, str]:
    """What the writer of one file noted about it. Raises UserError when the file is missing or its header damaged."""
    return _read_header(file)[0].metadata


def _read_header(file: Path) -> tuple[_Header, int, int]:
    """The header, where the tensors begin, and the size of the file."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if length > _MAX_HEADER_BYTES or size < 8:
                raise UserError(f"{file}: is not a safetensors file", _REMEDY)
            if 8 + length > size:
                raise UserError(f"{file}: is truncated: {size} bytes, its header ends at {8 + length}", _REMEDY)
            text = stream.read(length)
    except FileNotFoundError as error:
        raise UserError(f"{file}: is missing", _REMEDY) from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}", "restore the file") from error
    entries = parse_object(file, text, _REMEDY)
    header = validate(file, {"metadata": entries.pop("__metadata__", {}), "tensors": entries}, _Header, _REMEDY)
    return header, 8 + length, size


def _tensor(file: Path, name: str, entry: _Entry, data: int) -> LogicalTensor:
    if entry.dtype not in DTYPE_BYTES:
        raise UserError(f"{file}: tensor {name} has dtype {entry.dtype}", f"supported: {', '.join(DTYPE_BYTES)}")
    shape, (begin, end) = entry.shape, entry.data_offsets
    piece = Piece(file, data + begin, (0,) * len(shape), shape, contiguous_strides(shape))
    tensor = LogicalTensor(name, entry.dtype, shape, (piece,))
    if end - begin != tensor.nbytes:
        raise UserError(f"{file}: tensor {name}: data_offsets do not fit shape {list(shape)}", _REMEDY)
    return tensor


def _end(file: Path, tensors: Sequence[LogicalTensor], begin: int) -> int:
    """Where the last tensor ends. Raises UserError unless each begins where the one before it ends."""
    for tensor in tensors:
        if (offset := tensor.pieces[0].offset) != begin:
            fault = "a gap precedes it" if offset > begin else "overlaps the tensor before it"
            raise UserError(f"{file}: tensor {tensor.name}: {fault}", _REMEDY)
        begin += tensor.nbytes
    return begin
