"""Reader of safetensors: one file, or a Hugging Face model directory with or without an index.

The format: 8 bytes little-endian header length, that many bytes of JSON, then the tensors' bytes, row-major
(https://huggingface.co/docs/safetensors, "Format").
"""

import json
from pathlib import Path
from typing import Any

from hyperpod_ft.checkpoint.layout import DTYPE_BYTES, LogicalTensor, Piece, check, contiguous_strides
from hyperpod_ft.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def read_model(directory: Path) -> list[LogicalTensor]:
    """Every tensor of a model directory, file by file in the order of their bytes.

    Raises UserError when there are no safetensors weights, a shard is missing or truncated, or the index and the
    shards disagree.
    """
    if (directory / INDEX).is_file():
        weight_map = _json_object(directory / INDEX, (directory / INDEX).read_bytes()).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise UserError(f"{directory / INDEX}: has no weight_map", "download the model again")
        names = sorted(set(weight_map.values()))
        if outside := [name for name in names if Path(name).name != name]:
            raise UserError(f"{directory / INDEX}: names a file outside its directory: {outside[0]}", "do not trust it")
        tensors = [tensor for name in names for tensor in read_file(directory / name)]
        held = {tensor.name: tensor.pieces[0].file.name for tensor in tensors}
        if len(held) != len(tensors) or held != weight_map:
            wrong = sorted(name for name, _ in held.items() ^ weight_map.items())
            raise UserError(
                f"{directory / INDEX}: does not match its shards: {wrong[0] if wrong else 'a tensor stands twice'}",
                "download it again",
            )
        return tensors
    if (directory / SINGLE).is_file():
        return read_file(directory / SINGLE)
    raise UserError(
        f"{directory}: holds neither {SINGLE} nor {INDEX}", "convert the model to safetensors (save_pretrained)"
    )


def read_file(file: Path) -> list[LogicalTensor]:
    """Every tensor of one file, in the order of their bytes. Raises UserError when it is missing or damaged."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > _MAX_HEADER_BYTES:
                raise UserError(f"{file}: is no safetensors file", "it is damaged; make or download it again")
            header = _json_object(file, stream.read(length))
    except FileNotFoundError as error:
        raise UserError(f"{file}: is missing", "make or download it again") from error
    header.pop("__metadata__", None)
    try:
        tensors = [_tensor(file, name, entry, 8 + length) for name, entry in header.items()]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: its header is damaged: {error!r}", "make or download it again") from error
    tensors.sort(key=lambda tensor: tensor.pieces[0].offset)
    check(tensors, file)
    return tensors


def _tensor(file: Path, name: str, entry: Any, data: int) -> LogicalTensor:
    if entry["dtype"] not in DTYPE_BYTES:
        raise UserError(f"{file}: tensor {name} has dtype {entry['dtype']}", "this kit does not know it")
    shape = tuple(int(size) for size in entry["shape"])
    begin, end = entry["data_offsets"]
    piece = Piece(file, data + int(begin), (0,) * len(shape), shape, contiguous_strides(shape))
    tensor = LogicalTensor(name, entry["dtype"], shape, (piece,))
    if min(shape, default=0) < 0 or end - begin != tensor.nbytes:
        raise ValueError(f"{name}: data_offsets and shape disagree")
    return tensor


def _json_object(file: Path, content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError as error:
        raise UserError(f"{file}: is damaged: {error}", "make or download it again") from error
    if not isinstance(value, dict):
        raise UserError(f"{file}: is damaged: no JSON object", "make or download it again")
    return value
