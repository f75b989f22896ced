"""Reads a file from its end: logs and metrics are read again and again while they grow."""

import os
from collections.abc import Iterator
from pathlib import Path


def growing_tails(path: Path, first: int, longest: int | None = None) -> Iterator[str]:
    """The last `first` bytes of a file as text, then twice as many, up to `longest` or the whole file.

    Nothing of an empty file. Its first line may lack its beginning, unless it is the whole file. Raises OSError.
    """
    with path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        length = 0
        while length < (size if longest is None else min(size, longest)):
            length = min(size, 2 * length or first)
            stream.seek(size - length)
            yield stream.read(length).decode("utf-8", "replace")
