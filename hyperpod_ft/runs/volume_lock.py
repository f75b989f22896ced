"""The lock of a root: submissions share it, and removing what no run needs excludes them.

A submission skips stages whose outputs are there. Nothing may remove these before the jobs that use them are submitted.
"""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from hyperpod_ft import publish


@contextlib.contextmanager
def submitting(root: Path) -> Iterator[int]:
    """Nothing is removed while the block runs; waits until a removal has ended. Yields the descriptor of the lock."""
    with _locked(root, fcntl.LOCK_SH, "waiting for hyperpod-ft clean") as held:
        yield held


@contextlib.contextmanager
def removing(root: Path) -> Iterator[None]:
    """No run is submitted while the block runs; waits for submissions. Raises UserError on a volume without locks."""
    with _locked(root, fcntl.LOCK_EX, "waiting for a submission"):
        yield


@contextlib.contextmanager
def _locked(root: Path, kind: int, waiting: str) -> Iterator[int]:
    with _open(root / "records" / "clean.lock") as stream:
        try:
            fcntl.flock(stream, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            print(waiting, flush=True)
            fcntl.flock(stream, kind)
        except OSError as error:
            publish.raise_without_locks(error, root)
        yield stream.fileno()


def _open(path: Path) -> IO[str]:
    """The lock file, which every user of the volume locks, whoever made it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        stream = path.open("a")
    except PermissionError:
        return path.open()
    with contextlib.suppress(PermissionError):  # it is another user's
        path.chmod(0o666)
    return stream
