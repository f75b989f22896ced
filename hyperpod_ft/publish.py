"""Atomic output: files and directories appear under their final name only when they are complete and on disk."""

import contextlib
import errno
import fcntl
import json
import os
import platform
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from hyperpod_ft.errors import UserError


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file under a temporary name, fsync and rename. The umask limits `mode`, as for any new file."""
    write_bytes(path, text.encode(), mode)


def write_bytes(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Likewise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # two writers have two temporary files, by host, process and thread; the last rename wins, with a complete file
    partial = path.with_name(f".{path.name}.partial-{platform.node()}-{os.getpid()}-{threading.get_native_id()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write JSON like `write_text`, indented, keys in the given order."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def partial_of(final: Path) -> Path:
    """The name under which `final` is written until it is complete."""
    return final.with_name(f".{final.name}.partial")


def _replaced_of(final: Path) -> Path:
    """The name under which an earlier `final` is removed."""
    return final.with_name(f".{final.name}.replaced")


@contextlib.contextmanager
def new_directory(final: Path, *, keep_partial: bool = False) -> Iterator[Path]:
    """Yield an empty directory next to `final`; on success fsync its contents and rename it to `final`.

    An earlier `final` is replaced. The leftover of a killed attempt is removed first; with `keep_partial` it is yielded
    instead, so that a download can resume. The caller must hold a lock: there is only one writer.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(final)
    if not keep_partial:
        remove(partial)
    partial.mkdir(exist_ok=True)
    try:
        yield partial
    except BaseException:
        if not keep_partial:
            remove(partial)
        raise
    fsync_tree(partial)
    replace_directory(final, partial)


def replace_directory(final: Path, partial: Path) -> None:
    """Rename `partial`, already on disk in the same directory, to `final`; an earlier `final` is removed."""
    replaced = _replaced_of(final)
    remove(replaced)
    with contextlib.suppress(FileNotFoundError):
        final.rename(replaced)
    partial.rename(final)
    fsync(final.parent)
    remove(replaced)


def discard(directory: Path) -> None:
    """Remove a directory under another name, so that a kill here leaves a leftover, not a damaged directory."""
    replaced = _replaced_of(directory)
    remove(replaced)
    directory.rename(replaced)
    remove(replaced)


def remove_leftovers(parent: Path) -> None:
    """Remove what killed writers of directories in `parent` have left. There must be no writer now."""
    for name_of in (partial_of, _replaced_of):
        for leftover in parent.glob(name_of(parent / "*").name):
            remove(leftover)


def remove(path: Path) -> None:
    """Remove a file or directory tree if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_own_directory(path: Path) -> bool:
    """Whether it is a directory of this user's, and no link: where all may write, others may have made it."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def fsync_tree(directory: Path) -> None:
    for parent, _, names in os.walk(directory):
        for name in names:
            fsync(Path(parent, name))
        fsync(Path(parent))


def fsync(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_for_append(path: Path) -> IO[str]:
    return path.open("a")


@contextlib.contextmanager
def lock(
    path: Path,
    waiting: str = "",
    patience: float | None = None,
    *,
    shared: bool = False,
    open_file: Callable[[Path], IO[str]] = _open_for_append,
) -> Iterator[int]:
    """Lock `path`, across nodes where the file system supports flock, until the block or process ends.

    `shared`: others may hold it too, if they share it as well. Yields the descriptor that holds the lock: a child that
    inherits it holds it too. Prints `waiting` if another process holds it. Raises UserError on a volume without locks,
    or if it is still held after `patience` seconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_file(path) as stream:
        try:
            _acquire(stream, path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, waiting, patience)
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                problem = f"{path.parent}: this volume has no file locks"
                raise UserError(problem, "mount Lustre with -o flock") from error
            raise
        yield stream.fileno()


@contextlib.contextmanager
def sole_writer(final: Path) -> Iterator[None]:
    """Keep other processes from creating `final` while the block runs. An existing `final` is never replaced.

    Raises UserError when `final` exists, another process is creating it, or the volume has no locks.
    """
    if not final.name:
        raise UserError(f"{final}: already exists", "give the path of a new file or directory")
    final.parent.mkdir(parents=True, exist_ok=True)
    path = final.with_name(f".{final.name}.lock")
    with contextlib.ExitStack() as stack:
        descriptor = stack.enter_context(lock(path, patience=0))
        # the previous holder may have removed the file between our open and our lock
        while not _is_open_as(descriptor, path):
            descriptor = stack.enter_context(lock(path, patience=0))
        try:
            if final.exists() or final.is_symlink():
                raise UserError(f"{final}: already exists", "give another name, or remove it")
            yield
        finally:
            path.unlink(missing_ok=True)


def _is_open_as(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _acquire(stream: IO[str], path: Path, kind: int, waiting: str, patience: float | None) -> None:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(stream, kind | fcntl.LOCK_NB)
        return
    if waiting:
        print(waiting, flush=True)
    if patience is None:
        fcntl.flock(stream, kind)
        return
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(stream, kind | fcntl.LOCK_NB)
            return
        time.sleep(0.5)
    state = f"still locked by another process after {patience:.0f} s" if patience else "locked by another process"
    raise UserError(f"{path}: is {state}", "wait until it finishes, or stop it")
