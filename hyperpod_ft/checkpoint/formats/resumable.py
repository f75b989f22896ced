"""A directory of weights that is made in one or several attempts: what was finished before a kill is not made again.

Below the directory's temporary name lies a journal of the files that are whole and on disk, with their digests. It
counts for the same content only, and the files are read again before they are believed.
"""

import contextlib
import errno
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hyperpod_ft import publish
from hyperpod_ft.checkpoint.formats import checksums
from hyperpod_ft.checkpoint.tensors.scanning import Scanner
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import ByteProgress

JOURNAL = ".finished.json"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NoSpaceError(UserError):
    """The volume is full: what is finished is kept, and the same command goes on when there is space."""


@contextlib.contextmanager
def new_directory(target: Path, identity: Mapping[str, Any]) -> Iterator[Path]:
    """A directory to write weights into, published as `target`, with checksums, when all went well.

    `identity` is a JSON object: all that decides the content. Files that an attempt with the same one has finished are
    handed on, all else that attempts left is removed. When this one fails, nothing is left if it was refused; a full or
    failing volume, an interrupt or a kill leaves what is finished.
    """
    text = json.dumps(identity, sort_keys=True)
    if target.with_name(f".{target.name}.partial").is_file():
        publish.remove(target.with_name(f".{target.name}.partial"))
    with publish.new_directory(target, keep_partial=True) as partial:
        _clear(partial, text)
        try:
            yield partial
            checksums.record(partial, finished(partial))
        except OSError as error:
            _remove_unfinished(partial)
            if error.errno in _FULL:
                raise NoSpaceError(f"{target.parent}: {error.strerror}", "free space and run it again") from error
            error.filename = error.filename or str(partial)
            raise
        except NoSpaceError:
            _remove_unfinished(partial)
            raise
        except Exception:
            publish.remove(partial)
            raise
        (partial / JOURNAL).unlink()


def finished(directory: Path) -> dict[str, str]:
    """The digest of each file that is whole and on disk, by its name below a `new_directory`."""
    found: dict[str, str] = _read(directory)["finished"]
    return found


def note(directory: Path, name: str, digest: str) -> None:
    """A file is whole and on disk; `digest` is its XXH3 (128 bits) as hex."""
    journal = _read(directory)
    journal["finished"][name] = digest
    publish.write_json(directory / JOURNAL, journal)


def _clear(partial: Path, identity: str) -> None:
    """Leave what an attempt at the same content finished, and its journal."""
    journal = _read(partial)
    before: dict[str, str] = journal["finished"]
    if before and journal["identity"] != identity:
        _tell(f"{partial}: removed, another command began it: {len(before)} file(s)")
    whole = _whole(partial, before) if journal["identity"] == identity else {}
    publish.write_json(partial / JOURNAL, {"identity": identity, "finished": whole})
    _remove_unfinished(partial)
    if whole:
        _tell(f"{partial}: going on, {len(whole)} file(s) were finished before")


def _whole(partial: Path, before: Mapping[str, str]) -> dict[str, str]:
    present = {name: digest for name, digest in before.items() if (partial / name).is_file()}
    total = sum((partial / name).stat().st_size for name in present)
    with ByteProgress("check what is finished", total) as progress, Scanner(progress) as scanner:
        return {name: digest for name, digest in present.items() if scanner.scan(partial / name) == digest}


def _remove_unfinished(partial: Path) -> None:
    kept = {partial / JOURNAL, *(partial / name for name in finished(partial))}
    for path in publish.files_below(partial):
        if path not in kept:
            path.unlink()


def _read(directory: Path) -> dict[str, Any]:
    try:
        found = json.loads((directory / JOURNAL).read_text(encoding="utf-8"))
        if all(isinstance(digest, str) for digest in found["finished"].values()):
            return {"identity": found["identity"], "finished": found["finished"]}
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        pass
    return {"identity": None, "finished": {}}


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
