"""Files of the node itself, written atomically, and only if they differ."""

from __future__ import annotations

import os
import stat
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Sequence

from provision.node import Node
from provision.step import Step


@dataclass(frozen=True)
class File:
    """A file as it should be. `path` is absolute on the node."""

    path: str
    text: str
    mode: int = 0o644


def read(node: Node, path: str) -> str:
    """The text of a file on the node, "" if it is missing."""
    try:
        return node.path(path).read_text()
    except FileNotFoundError:
        return ""


def difference(node: Node, file: File) -> list[str]:
    """How the file differs: nothing, or one line."""
    path = node.path(file.path)
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return [f"{file.path} is not a regular file"]
        if path.read_bytes() != file.text.encode():
            return [f"{file.path} differs"]
    except FileNotFoundError:
        return [f"no {file.path}"]
    if stat.S_IMODE(status.st_mode) != file.mode:
        return [f"{file.path} has mode {stat.S_IMODE(status.st_mode):o}, not {file.mode:o}"]
    return []


def write(node: Node, file: File) -> None:
    """Write the file and its parent directories, unless it is already as it should be."""
    if not difference(node, file):
        return
    path = node.path(file.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The same name in all runs: the next one replaces a killed one's. `*.conf` does not match it.
    partial = path.with_name(f".{path.name}.provision")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(file.text.encode())
        stream.flush()
        os.fchmod(stream.fileno(), file.mode)
        os.fsync(stream.fileno())
    partial.replace(path)
    sync_directory(path.parent)


def sync(path: Path) -> None:
    """Make the content of a file durable."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def sync_directory(directory: Path) -> None:
    """Make renames and links in the directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FilesStep(Step):
    """A step that only writes files."""

    @abstractmethod
    def files(self, node: Node) -> Sequence[File]:
        """The files as they should be on this node."""

    def missing(self, node: Node) -> Sequence[str]:
        return [line for file in self.files(node) for line in difference(node, file)]

    def do(self, node: Node) -> None:
        for file in self.files(node):
            write(node, file)
