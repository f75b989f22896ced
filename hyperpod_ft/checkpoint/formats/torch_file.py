"""Reads where a file written by torch.save stores each tensor's elements, from its index alone.

torch.save writes a zip archive, uncompressed: `data.pkl` with the objects, and a record `data/N` for each storage
(torch/serialization.py). Such an archive may be a whole file, or, in a `.distcp` file, a range of one.
"""

import io
import os
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from hyperpod_ft.checkpoint.formats import safe_pickle
from hyperpod_ft.checkpoint.tensors.logical_tensor import DTYPE_BYTES
from hyperpod_ft.errors import UserError

# torch pickles a storage's dtype as the name of a legacy class.
_STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
_LOCAL_HEADER = struct.Struct("<4s22xHH")
# Raised by archives that are truncated, overwritten or from another program.
_DAMAGED = (
    zipfile.BadZipFile,
    zlib.error,
    OSError,
    EOFError,
    KeyError,
    ValueError,
    struct.error,
    NotImplementedError,
    RuntimeError,
)
_MAX_INDEX_BYTES = 1 << 28
_MAX_ORDER_BYTES = 16


@dataclass(frozen=True)
class StoredTensor:
    """A tensor inside a file: `offset` in bytes from the file's start, strides in elements."""

    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class _Storage:
    dtype: str
    offset: int
    elements: int


@dataclass(frozen=True)
class Archive:
    """The output of one torch.save: bytes [offset, offset + length) of a file, or all of it."""

    file: Path
    offset: int = 0
    length: int | None = None


@dataclass(frozen=True)
class ZipRecord:
    """A member of an archive: `size` bytes of the file from `offset`, and the CRC-32 that torch.save recorded."""

    offset: int
    size: int
    crc32: int


def records(archive: Archive) -> list[ZipRecord]:
    """Every record of an archive, the tensors' bytes among them. Raises UserError when it cannot be read."""
    with _opened(archive) as opened:
        return [
            ZipRecord(archive.offset + _data_offset(opened, record), record.file_size, record.CRC)
            for record in opened.infolist()
            if record.compress_type == zipfile.ZIP_STORED
        ]


def describe(
    file: Path, offset: int = 0, length: int | None = None, names: safe_pickle.Names = MappingProxyType({})
) -> Any:
    """The object saved in bytes [offset, offset + length) of a file, or in all of it, each tensor as a StoredTensor.

    Raises UserError when there is no such archive, or its pickle names anything but tensors and `names`.
    """
    with _opened(Archive(file, offset, length)) as archive:
        return _describe(file, offset, archive, {**_NAMES, **names})


@contextmanager
def _opened(archive: Archive) -> Iterator[zipfile.ZipFile]:
    file, offset, length = archive.file, archive.offset, archive.length
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size - offset if length is None else length
            with zipfile.ZipFile(_Window(stream, offset, size)) as opened:
                yield opened
    except FileNotFoundError as error:
        raise UserError(f"{file}: is missing", "the checkpoint is incomplete: use an earlier one") from error
    except _DAMAGED as error:
        place = "" if length is None else f" bytes {offset} to {offset + length}"
        raise UserError(
            f"{file}:{place} cannot be read as torch.save writes: {error}",
            "the file is truncated or damaged: use an earlier checkpoint",
        ) from error


def _describe(file: Path, window: int, archive: zipfile.ZipFile, names: safe_pickle.Names) -> Any:
    index = next((name for name in archive.namelist() if name.endswith("data.pkl")), None)
    if index is None:
        raise ValueError("no data.pkl")
    prefix = index.removesuffix("data.pkl")
    order = prefix + "byteorder"
    for name, limit in ((index, _MAX_INDEX_BYTES), (order, _MAX_ORDER_BYTES)):
        record = archive.NameToInfo.get(name)
        if record and (record.compress_type != zipfile.ZIP_STORED or record.file_size > limit):
            raise ValueError(f"{name} is not what torch.save writes")
    if order in archive.NameToInfo and archive.read(order) != b"little":
        raise ValueError("big-endian")

    def storage(reference: Any) -> _Storage:
        kind, dtype, key, _location, elements = reference
        record = archive.getinfo(f"{prefix}data/{key}")
        if kind != "storage" or record.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"record {key} is not an uncompressed storage")
        if record.file_size < elements * DTYPE_BYTES[dtype]:
            raise ValueError(f"record {key} is too short")
        return _Storage(dtype, window + _data_offset(archive, record), elements)

    return safe_pickle.loads(archive.read(index), names, file, storage)


def _data_offset(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> int:
    # the central directory does not have the length of the local header's padding
    stream = archive.fp
    assert stream is not None
    stream.seek(record.header_offset)
    magic, name_length, extra_length = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
    if magic != b"PK\x03\x04":
        raise ValueError("a record is not where the directory says")
    return int(record.header_offset + _LOCAL_HEADER.size + name_length + extra_length)


def _tensor(
    storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_rest: Any
) -> StoredTensor:
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if 0 not in shape and (offset < 0 or offset + reach > storage.elements):
        raise ValueError("a tensor reaches past its storage")
    return StoredTensor(storage.dtype, storage.offset + offset * DTYPE_BYTES[storage.dtype], shape, strides)


def _parameter(tensor: StoredTensor, *_rest: Any) -> StoredTensor:
    return tensor


_NAMES: dict[tuple[str, str], Callable[..., Any] | str] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("collections", "OrderedDict"): OrderedDict,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
}


class _Window(io.RawIOBase):
    """A range of a file, read as a file."""

    def __init__(self, stream: BinaryIO, offset: int, length: int) -> None:
        self._stream = stream
        self._offset = offset
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise OSError("seek before the start")
        self._position = start + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._position)
        self._stream.seek(self._offset + self._position)
        content = self._stream.read(left if size < 0 else min(size, left))
        self._position += len(content)
        return content
