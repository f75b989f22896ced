"""What an adapter was trained on and what a model was merged from: in the metadata of their safetensors files.

A tensor is known by its dtype and shape and the first and last bytes of its values, which every training changes; its
name, and how many files a model has, do not matter. So little is read.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from hyperpod_ft.checkpoint.adapters.lora_config import WEIGHTS
from hyperpod_ft.checkpoint.formats.safetensors_file import SINGLE, read_file, read_index, read_metadata, read_model
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.digests import text_sha256
from hyperpod_ft.errors import UserError

_BASE, _ADAPTERS = "hyperpod_ft.base", "hyperpod_ft.adapters"
_SAMPLE_BYTES = 4096


def of_adapter(base: Iterable[LogicalTensor]) -> dict[str, str]:
    """The metadata of an adapter that was trained on a model with these tensors."""
    return {_BASE: _identity(base)}


def of_merged(base: Path, adapters: Iterable[Iterable[LogicalTensor]]) -> dict[str, str]:
    """The metadata of a merge of adapters, given by their tensors, into the model in `base`."""
    return {_ADAPTERS: ",".join([*_merged(base), *map(_identity, adapters)])}


def check_base(base: Path, adapter: Path) -> bool:
    """Whether the adapter says what it was trained on.

    Raises UserError when that was another model than `base`, or the adapter has been merged into `base` already.
    """
    if _identity(read_file(adapter / WEIGHTS)) in _merged(base):
        raise UserError(
            f"{base}: the adapter {adapter} was merged into it already",
            "give the model that the adapter was trained on",
        )
    trained_on = read_metadata(adapter / WEIGHTS).get(_BASE)
    if trained_on and trained_on != _identity(read_model(base)):
        raise UserError(
            f"{base}: is not the model that the adapter {adapter} was trained on",
            "give that model, with the weights and the dtype that it had; merge several adapters at once",
        )
    return trained_on is not None


def _merged(model: Path) -> Sequence[str]:
    """The adapters that were merged into a model, as far as it says so."""
    index = read_index(model)
    found = read_metadata(model / (index.files[0] if index else SINGLE)).get(_ADAPTERS, "")
    return [adapter for adapter in found.split(",") if adapter]


def _identity(tensors: Iterable[LogicalTensor]) -> str:
    """A digest by which a set of tensors in safetensors files is known. Raises UserError when a file cannot be read."""
    samples = set()
    files: dict[Path, int] = {}
    with ExitStack() as stack:
        for tensor in tensors:
            (piece,) = tensor.pieces
            try:
                if piece.file not in files:
                    files[piece.file] = os.open(piece.file, os.O_RDONLY | os.O_CLOEXEC)
                    stack.callback(os.close, files[piece.file])
                size = min(_SAMPLE_BYTES, tensor.nbytes)
                ends = (piece.offset, piece.offset + tensor.nbytes - size)
                content = b"".join(os.pread(files[piece.file], size, offset) for offset in ends)
            except OSError as error:
                raise UserError(f"{piece.file}: cannot be read: {error.strerror}", "restore the file") from error
            samples.add(f"{tensor.dtype} {tensor.shape} {hashlib.sha256(content).hexdigest()}")
    return text_sha256("\n".join(sorted(samples)))[:32]
