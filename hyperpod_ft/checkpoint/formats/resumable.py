"""A directory of weights, written in one or several attempts: files finished before a kill are not written again.

The temporary directory has a journal of the files that are complete and on disk, with their digests. It is used only
for the same content, and after the files' digests have been checked.
"""

import contextlib
import errno
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hyperpod_ft import digests, publish
from hyperpod_ft.checkpoint.formats import checksums
from hyperpod_ft.checkpoint.tensors.blocks import Scanner
from hyperpod_ft.errors import VOLUME_FULL, UserError
from hyperpod_ft.progress import ByteProgress, count

JOURNAL = ".finished.json"
_FULL = (*VOLUME_FULL, errno.EFBIG)


class NoSpaceError(UserError):
    """The volume is full: finished files are kept, and the same command resumes when there is space."""


@contextlib.contextmanager
def resumable_directory(target: Path, identity: Mapping[str, Any]) -> Iterator[Path]:
    """A directory to write weights into, published as `target`, with checksums, on success.

    `identity` is a JSON object: everything that decides the content. Files that an attempt with the same identity
    finished are kept; everything else that attempts left is removed. An attempt that is refused leaves nothing; a full
    or failing volume, an interrupt or a kill leaves the finished files.
    """
    text = json.dumps(identity, sort_keys=True)
    if publish.partial_of(target).is_file():
        publish.remove(publish.partial_of(target))
    with publish.new_directory(target, keep_partial=True) as partial:
        _clear(partial, text)
        try:
            yield partial
            checksums.record(partial, finished(partial))
        except OSError as error:
            _remove_unfinished(partial)
            if error.errno in _FULL:
                raise NoSpaceError(
                    f"{target.parent}: {error.strerror}", "free space on the volume and run the command again"
                ) from error
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
    """The digest of each file that is complete and on disk, by its name below a `resumable_directory`."""
    found: dict[str, str] = _read(directory)["finished"]
    return found


def note(directory: Path, name: str, digest: str) -> None:
    """Note that a file is complete and on disk; `digest` is its XXH3 (128 bits) as hex."""
    journal = _read(directory)
    journal["finished"][name] = digest
    publish.write_json(directory / JOURNAL, journal)


def _clear(partial: Path, identity: str) -> None:
    """Keep what an attempt at the same content finished, and its journal."""
    journal = _read(partial)
    before: dict[str, str] = journal["finished"]
    if before and journal["identity"] != identity:
        _report(f"{partial}: removed {count(len(before), 'file')} that another command wrote")
    whole = _whole(partial, before) if journal["identity"] == identity else {}
    publish.write_json(partial / JOURNAL, {"identity": identity, "finished": whole})
    _remove_unfinished(partial)
    if whole:
        _report(f"{partial}: resuming: {count(len(whole), 'file')} already finished")


def _whole(partial: Path, before: Mapping[str, str]) -> dict[str, str]:
    present = {name: digest for name, digest in before.items() if (partial / name).is_file()}
    total = sum((partial / name).stat().st_size for name in present)
    with ByteProgress("check finished files", total) as progress, Scanner(progress) as scanner:
        return {name: digest for name, digest in present.items() if scanner.scan(partial / name) == digest}


def _remove_unfinished(partial: Path) -> None:
    kept = {partial / JOURNAL, *(partial / name for name in finished(partial))}
    for path in digests.files_below(partial):
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


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
