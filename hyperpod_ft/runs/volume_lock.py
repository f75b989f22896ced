"""The lock of a root: submissions share it, and removing what no run needs excludes them.

A submission skips stages whose outputs are there. Nothing may remove these before the jobs that use them are submitted.
"""

import contextlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

from hyperpod_ft import publish


def submitting(root: Path) -> AbstractContextManager[int]:
    """Nothing is removed while the block runs; waits until a removal has ended. Yields the descriptor of the lock.

    Raises UserError on a volume without locks.
    """
    return publish.lock(_path(root), "waiting for hyperpod-ft clean", shared=True, open_file=_open)


def removing(root: Path) -> AbstractContextManager[int]:
    """No run is submitted while the block runs; waits for submissions. Raises UserError on a volume without locks."""
    return publish.lock(_path(root), "waiting for a submission", open_file=_open)


def _path(root: Path) -> Path:
    return root / "records" / "clean.lock"


def _open(path: Path) -> IO[str]:
    """The lock file, which every user of the volume locks, whoever made it."""
    try:
        stream = path.open("a")
    except PermissionError:
        return path.open()
    with contextlib.suppress(PermissionError):  # it is another user's
        path.chmod(0o666)
    return stream
