"""A copy of the kit's code on the shared volume: jobs run the code that they were submitted with.

<copies>/hyperpod-ft-<version>-<digest>/hyperpod_ft/    the package, with its templates

Which jobs import from a copy is known from their scripts. A process that no run's script starts locks it instead.
"""

import fcntl
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from hyperpod_ft import __version__, digests, publish
from hyperpod_ft.runs import volume_lock
from hyperpod_ft.shipped import PACKAGE, shipped

_LOCKED = "hyperpod_ft/__init__.py"
# Of the package's files. Whatever else lies in a checkout, such as keys or notes, goes to no volume and no bucket.
_SUFFIXES = {".py", ".html", ".sh", ".txt", ".yaml"}


def snapshot(copies: Path) -> Path:
    """A directory below `copies`, named after its content, that holds the `hyperpod_ft` package as it is now."""
    sources, identity = _sources()
    final = copies / f"hyperpod-ft-{__version__}-{identity[:32]}"
    with publish.lock(copies / ".lock"):
        if not final.is_dir():
            with publish.new_directory(final) as directory:
                for target, file in sources.items():
                    (directory / target).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, directory / target)
    return final


def digest() -> str:
    """Identifies the kit's code as it is now, in hexadecimal digits."""
    return _sources()[1]


def archive(file: Path) -> None:
    """Write a zip from which Python imports the kit's code as it is now."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as made:
        for target, source in _sources()[0].items():
            made.write(source, target)


def code_for(python: Path, copies: Path) -> dict[str, str]:
    """The environment in which another interpreter, which may lack the kit or have another version, has this code.

    `clean` keeps the copy below `copies` until this process, and what it becomes, has ended.
    """
    if python == Path(sys.executable):
        return {}
    with volume_lock.submitting(copies.parent):  # `clean` must not remove the copy before it is held
        copy = snapshot(copies)
        hold(copy)
    return {"PYTHONPATH": str(copy)}


def hold(copy: Path) -> int:
    """Lock the copy until this process ends, or the program that it becomes. Returns the descriptor of the lock."""
    descriptor = os.open(copy / _LOCKED, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    os.set_inheritable(descriptor, True)
    return descriptor


def is_held(copy: Path) -> bool:
    """Whether a process on any machine holds the copy. Raises OSError when that is not known."""
    try:
        with (copy / _LOCKED).open("rb+") as stream:  # over NFS, only files that are open for writing can be locked
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


@cache
def _sources() -> tuple[dict[Path, Path], str]:
    """The files by their paths in a copy, and a digest of all: once for a process, whose code does not change."""
    sources = {Path("hyperpod_ft") / file.relative_to(PACKAGE): file for file in _code()}
    templates = shipped("templates")
    sources |= {
        Path("hyperpod_ft/templates") / file.relative_to(templates): file for file in digests.files_below(templates)
    }
    return sources, digests.files_sha256({target.as_posix(): file for target, file in sources.items()})


def _code() -> Iterator[Path]:
    # a wheel has these inside the package, a checkout next to it
    elsewhere = {PACKAGE / "templates", PACKAGE / "examples", PACKAGE / "lifecycle"}
    for file in digests.files_below(PACKAGE):
        if file.suffix in _SUFFIXES and not elsewhere & set(file.parents):
            yield file
