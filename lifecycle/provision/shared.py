"""Concurrent changes of the shared file system: each node prepares under its own name, then publishes.

/fsx/.provision has these names and is accessible to root alone. Publishing is one rename or link, so there is no lock
that a dying node could leave behind.
"""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from provision.errors import NodeError
from provision.node import Node


def folder(node: Node) -> Path:
    """/fsx/.provision, which `staging` creates."""
    return node.fsx / ".provision"


def staging(node: Node, name: str) -> Path:
    """An unused path on the shared file system, for this node alone."""
    folder(node).mkdir(mode=0o755, exist_ok=True)
    (folder(node) / "staging").mkdir(mode=0o700, exist_ok=True)
    path = _staging(node) / f"{node.identity.instance_id}.{name}"
    remove(path)
    return path


def leftovers(node: Node) -> list[Path]:
    """The files that a killed run on this node was preparing."""
    own = f"{node.identity.instance_id}."
    parent = folder(node) / "staging"
    return sorted(path for path in _staging(node).iterdir() if path.name.startswith(own)) if parent.is_dir() else []


def checked_folder(node: Node) -> Path:
    """`folder`, also before it exists.

    Raises NodeError if users other than root could have written there, as where users may write to /fsx itself.
    """
    with suppress(FileNotFoundError):
        _check(folder(node))
    return folder(node)


def _staging(node: Node) -> Path:
    """Raises NodeError like `checked_folder`."""
    parent = folder(node) / "staging"
    for directory in (parent.parent, parent):
        _check(directory)
    return parent


def _check(directory: Path) -> None:
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise NodeError(f"{directory} is not owned by root alone", "move it away")


def remove(path: Path) -> None:
    """Remove a file, link or directory, if it exists."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        return


def publish_text(node: Node, path: Path, text: str, mode: int = 0o644) -> None:
    """Write the file atomically. If several nodes do so at once, the text of one of them remains."""
    partial = staging(node, path.name)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)
        stream.flush()
        os.fchmod(stream.fileno(), mode)
        os.fsync(stream.fileno())
    partial.replace(path)
