"""The directories of memory checkpoints in /dev/shm, where all users may write: one for a job, in it one a node."""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.engines.ranks import Interrupted, Ranks
from hyperpod_ft.errors import UserError

_RESTART_SECONDS = 3600  # that a job may take to start its ranks again


@contextlib.contextmanager
def node_memory(directory: Path | None, ranks: Ranks) -> Iterator[Path | None]:
    """Have the node's directory for the block. After a crash it stays, for the ranks that the same job starts again.

    Its parent is the job's. One rank of the node makes both, and removes what other jobs of this user have left that
    did not restart. Collective. Yields None where, on some node, another user has taken the parent's name. Raises
    UserError when the directories cannot be made.
    """
    if directory is None:
        yield None
        return
    lock, stays = None, False
    try:
        with shared_errors(ranks, "memory/made", directory):
            lock = None if ranks.local_rank else _make(directory)
        lacks = lock is None and not ranks.local_rank
        taken = [job for job in ranks.gather("memory/taken", str(directory.parent) if lacks else "") if job]
        if taken and ranks.is_rank_0:
            print(f"train: {taken[0]} is not a directory of this user: no memory checkpoints are kept", flush=True)
        yield None if taken else directory
    except (UserError, Interrupted):
        raise
    except BaseException:
        stays = True
        raise
    finally:
        if lock is not None:
            if not stays:
                _remove(directory)
            os.close(lock)


def _make(directory: Path) -> int | None:
    """Make it; returns what `_lock` does for its parent. None: another user has taken that name. Raises OSError."""
    job = directory.parent
    with contextlib.suppress(FileExistsError):
        job.mkdir(mode=0o700)
    if not publish.is_own_directory(job):
        return None
    if job.stat().st_mode & 0o077:  # what is in it may be another user's
        shutil.rmtree(job)
        job.mkdir(mode=0o700)
    descriptor = _lock(job, fcntl.LOCK_SH)
    try:
        directory.mkdir(exist_ok=True)
        for other in job.parent.glob(f"{job.name.rpartition('-')[0]}-*"):
            with contextlib.suppress(OSError):
                _remove_if_left(other)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_if_left(job: Path) -> None:
    """Remove the directory of a job that did not restart. Raises OSError when one uses it, or it is not ours."""
    descriptor = _lock(job, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        if time.time() - max(file.stat().st_mtime for file in (job, *job.rglob("*"))) > _RESTART_SECONDS:
            shutil.rmtree(job)
    finally:
        os.close(descriptor)


def _lock(directory: Path, kind: int) -> int:
    """A descriptor that holds the lock until it is closed, or the process ends. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove(directory: Path) -> None:
    if publish.is_own_directory(directory.parent):
        shutil.rmtree(directory, ignore_errors=True)
        with contextlib.suppress(OSError):  # where nodes are daemons on one machine, another's is beside it
            directory.parent.rmdir()


@contextlib.contextmanager
def shared_errors(ranks: Ranks, occasion: str, directory: Path) -> Iterator[None]:
    """Raise UserError on all ranks when the block raises OSError on one, once every node has freed its memory.

    Collective. Ranks that do not hear of it would be killed, and free nothing.
    """
    problem = ""
    try:
        yield
    except OSError as error:
        problem = f"training.memory_checkpoint_every_steps: {directory}: {error.strerror or error}"
    problems = [told for told in ranks.gather(occasion, problem) if told]
    if problems:
        if ranks.local_rank == 0:
            _remove(directory)
        ranks.gather(f"{occasion}/removed", None)
        raise UserError(problems[0], "free or correct it, or leave the key out")
