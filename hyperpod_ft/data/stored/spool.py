"""Numbers in unnamed files: a dataset has more of them than fit in memory, one or more for each example or token."""

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", bound=np.generic)


class Spool(Generic[Number]):
    """Numbers of one type, appended to a file; only those that are read are in memory."""

    def __init__(self, directory: Path, dtype: type[Number]) -> None:
        """The file uses space in `directory` until the process ends."""
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - open until the process ends
        self._dtype = np.dtype(dtype)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, numbers: NDArray[Any]) -> None:
        # written, not mapped: on a full volume a write raises an error, but a mapping gets a signal
        self._file.seek(0, os.SEEK_END)
        self._file.write(np.ascontiguousarray(numbers, self._dtype).ravel().data)
        self._count += numbers.size

    def read(self, first: int, stop: int) -> NDArray[Number]:
        self._file.seek(first * self._dtype.itemsize)
        return np.fromfile(self._file, self._dtype, stop - first)

    def mapped(self) -> "Mapped[Number]":
        """All of them, of which there is at least one, for reading in any order."""
        self._file.flush()
        return Mapped(mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ), self._dtype)


class Mapped(Generic[Number]):
    """A memory-mapped file of numbers."""

    def __init__(self, pages: mmap.mmap, dtype: "np.dtype[Number]") -> None:
        self._pages = pages
        self.numbers: NDArray[Number] = np.frombuffer(pages, dtype)

    def release(self) -> None:
        """Give back the pages that were read, which count as this process's memory; they stay in the system's cache."""
        self._pages.madvise(mmap.MADV_DONTNEED)
