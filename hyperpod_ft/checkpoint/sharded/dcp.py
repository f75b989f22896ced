"""Reader of torch.distributed.checkpoint directories: what engine `torch` writes.

`.metadata` is a pickle of torch.distributed.checkpoint.metadata.Metadata; each `.distcp` file is a row of archives as
torch.save writes them, one a piece (torch/distributed/checkpoint/filesystem.py). Both are read as descriptions.
"""

from pathlib import Path
from typing import Any

from hyperpod_ft.checkpoint.formats import safe_pickle, torch_file
from hyperpod_ft.checkpoint.formats.safe_pickle import Inert, inert
from hyperpod_ft.checkpoint.formats.torch_file import Archive
from hyperpod_ft.checkpoint.sharded.description import DAMAGED, DAMAGED_FILE, INCOMPLETE
from hyperpod_ft.checkpoint.tensors.logical_tensor import DTYPE_OF_TORCH_NAME, LogicalTensor, Piece, check
from hyperpod_ft.errors import UserError

INDEX = ".metadata"


class _Tensor(Inert):
    """TensorStorageMetadata, unlike what describes other objects."""


def _strided(layout: str) -> str:
    if layout != "torch.strided":
        raise ValueError(f"layout {layout}")
    return layout


_METADATA = "torch.distributed.checkpoint.metadata"
_NAMES: safe_pickle.Names = {
    **{
        (_METADATA, name): Inert
        for name in (
            *("Metadata", "ChunkStorageMetadata", "BytesStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING"),
            "TensorProperties",  # its state is (dtype, layout, requires_grad, memory format, pinned)
            "MetadataIndex",  # key of the storage table: name of the tensor and offset of the chunk
        )
    },
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Inert,
    ("torch.serialization", "_get_layout"): _strided,
    ("torch", "Size"): tuple,
    # Python 3.11 pickles members of an enumeration as getattr(class, name); the member is not needed.
    ("builtins", "getattr"): inert,
    # The directory that the checkpoint was saved to; Python 3.13 renamed the module.
    ("pathlib", "PosixPath"): inert,
    ("pathlib._local", "PosixPath"): inert,
    **{("torch", name): dtype for name, dtype in DTYPE_OF_TORCH_NAME.items()},
}


def read(directory: Path, prefix: str = "") -> tuple[list[LogicalTensor], list[Archive]]:
    """The tensors whose key begins with `prefix`, which is removed from their names, in the order of the index; and
    the archives of the whole checkpoint.

    Raises UserError when the directory is not such a checkpoint, or a tensor lacks a piece, reaches past the end of
    its file, or is stored in an unsupported form.
    """
    metadata = index(directory)
    try:
        tensors = _tensors(directory, metadata, prefix)
        archives = [
            Archive(_file(directory, stored.relative_path), stored.offset, stored.length)
            for place, stored in metadata.storage_data.items()
            if place.state.get("offset") is not None
        ]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{directory / INDEX}: does not describe a checkpoint: {error!r}", DAMAGED_FILE) from error
    check(tensors, directory)
    return tensors, archives


def _file(directory: Path, name: str) -> Path:
    if Path(name).name != name:
        raise UserError(
            f"{directory / INDEX}: names {name!r}, which is outside the directory",
            "do not use the checkpoint unless you trust its source",
        )
    if not (directory / name).is_file():
        raise UserError(f"{directory / name}: is missing", INCOMPLETE)
    return directory / name


def index(directory: Path) -> Any:
    """The index as inert stand-ins. Raises UserError when it is missing or is not an index."""
    file = directory / INDEX
    try:
        content = file.read_bytes()
    except FileNotFoundError as error:
        raise UserError(
            f"{directory / INDEX}: is missing: the torch.distributed.checkpoint is incomplete", "use an earlier one"
        ) from error
    return safe_pickle.loads(content, _NAMES, file)


def _tensors(directory: Path, metadata: Any, prefix: str) -> list[LogicalTensor]:
    ranges: dict[tuple[str, tuple[int, ...]], Any] = {
        (place.fqn, place.offset): stored
        for place, stored in metadata.storage_data.items()
        if place.state.get("offset") is not None
    }
    tensors = []
    for key, described in metadata.state_dict_metadata.items():
        if not key.startswith(prefix) or not isinstance(described, _Tensor):
            continue
        dtype = described.properties.state[0]
        shape = tuple(described.size)
        pieces = tuple(
            _piece(directory, key, dtype, chunk, ranges.get((key, chunk.offsets)))
            for chunk in described.chunks
            # ranks beyond the tensor's size hold empty chunks
            if 0 not in chunk.sizes
        )
        tensors.append(LogicalTensor(key.removeprefix(prefix), dtype, shape, pieces))
    return tensors


def _piece(directory: Path, key: str, dtype: str, chunk: Any, stored: Any) -> Piece:
    where = f"tensor {key}, piece at {list(chunk.offsets)}"
    if stored is None:
        raise UserError(f"{directory}: {where}: is missing from the checkpoint", "use an earlier one")
    if stored.state.get("transform_descriptors"):
        raise UserError(f"{directory}: {where}: is compressed", "save checkpoints without transforms")
    name = stored.relative_path
    file = _file(directory, name)
    found = torch_file.describe(file, stored.offset, stored.length)
    if not isinstance(found, torch_file.StoredTensor) or found.dtype != dtype or found.shape != chunk.sizes:
        raise UserError(f"{file}: {where}: differs from the index", DAMAGED)
    return Piece(file, found.offset, chunk.offsets, found.shape, found.strides)
