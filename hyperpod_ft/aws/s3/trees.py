"""Push files of a directory to an S3 location, and pull them: only those that differ, each verified by its digest.

`client` is boto3's for s3. A file has the key `<prefix>/<its path below the root>`.
Objects that were not asked for are never touched. Every function raises UserError for what a user can correct.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from hyperpod_ft import publish
from hyperpod_ft.aws.s3 import objects, transfers
from hyperpod_ft.aws.s3.objects import Entry, Location, check_name, explained_s3
from hyperpod_ft.aws.s3.transfers import Transfers
from hyperpod_ft.digests import file_xxh3
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import ByteProgress


def listing(client: Any, url: str, prefix: str = "") -> list[Entry]:
    """Every file at or below `prefix`, a name relative to `url`, sorted by name."""
    with explained_s3(url, "read"):
        return objects.entries(client, Location.of(url), prefix)


def listed(client: Any, url: str, names: Iterable[str]) -> list[Entry]:
    """The files of these names that exist, sorted by name."""
    with explained_s3(url, "read"):
        found = objects.entries_named(client, Location.of(url), names)
    return [found[name] for name in sorted(found)]


def has(client: Any, url: str, files: Mapping[str, Path]) -> bool:
    """Whether a location has these files, by name, as `push` would leave them."""
    location = Location.of(url)
    with explained_s3(url, "read"):
        there = objects.entries_named(client, location, files)
        return len(there) == len(files) and all(
            objects.digest_of(client, location.bucket, there[name]) == file_xxh3(path) for name, path in files.items()
        )


def push(
    client: Any, url: str, root: Path, files: Iterable[Path], what: str = "push", digests: Mapping[Path, str] = {}
) -> None:
    """Upload files below `root`; those that are there with the same size and digest are skipped.

    An object appears when it is complete. `digests`: XXH3 (128 bits) as hex of files whose digest is known.
    """
    location = Location.of(url)
    named = {path.relative_to(root).as_posix(): path for path in files}
    total = sum(path.stat().st_size for path in named.values())
    with explained_s3(url, "write"), ByteProgress(what, total) as progress:
        there = objects.entries_named(client, location, named)
        uploads = Transfers(client, location.bucket, progress.add)

        def send(name: str) -> None:
            path, entry = named[name], there.get(name)
            digest, size = digests.get(path, ""), path.stat().st_size
            if entry is not None and entry.size == size:
                digest = digest or file_xxh3(path)
                if objects.digest_of(client, location.bucket, entry) == digest:
                    progress.add(size)
                    return
            uploads.upload(path, location.key(name), digest)

        uploads.run(send, named)


def pull(client: Any, url: str, root: Path, prefix: str = "", what: str = "pull", *, flush: bool = True) -> None:
    """Download every file at or below `prefix` to the same name below `root`, as `pull_entries` does."""
    _pull(client, url, root, listing(client, url, prefix), what, flush)


def pull_named(
    client: Any, url: str, root: Path, names: Iterable[str], what: str = "pull", *, flush: bool = True
) -> None:
    """Download the files of these names, as `pull_entries` does. Raises UserError when one is missing."""
    wanted = set(names)
    found = listed(client, url, wanted)
    if missing := sorted(wanted - {entry.name for entry in found}):
        others = f", and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise UserError(f"{url}/{missing[0]}: is missing{others}", "run the stage that writes it again")
    _pull(client, url, root, found, what, flush)


def _pull(client: Any, url: str, root: Path, entries: Collection[Entry], what: str, flush: bool) -> None:
    with ByteProgress(what, sum(entry.size for entry in entries)) as progress:
        pull_entries(client, url, root, entries, progress.add, flush=flush)


def pull_entries(
    client: Any,
    url: str,
    root: Path,
    entries: Collection[Entry],
    received: Callable[[int], object] = lambda _: None,
    *,
    flush: bool = True,
) -> None:
    """Download objects to their names below `root`; files that are there with the same size and digest are skipped.

    An object that was not written by `push` has no digest: it is skipped when a file of its size is newer. A
    file appears when it is complete and verified, in place of an earlier one; all are on disk when this returns, unless
    `flush` is off: a loss of power may then damage them. `received` is given the bytes as they come.
    """
    location = Location.of(url)
    for entry in entries:
        check_name(url, entry.name)
    with explained_s3(url, "read"):
        downloads = Transfers(client, location.bucket, received)

        def fetch(entry: Entry) -> None:
            if _is_there(client, location.bucket, entry, root / entry.name):
                received(entry.size)
            else:
                downloads.download(entry, root / entry.name)

        downloads.run(fetch, entries)
        _finish(root, entries, flush)


def _is_there(client: Any, bucket: str, entry: Entry, path: Path) -> bool:
    """Whether a file has an object's content."""
    if not path.is_file() or path.stat().st_size != entry.size:
        return False
    if digest := objects.digest_of(client, bucket, entry):
        return file_xxh3(path) == digest
    return path.stat().st_mtime >= entry.modified


def _finish(root: Path, entries: Collection[Entry], flush: bool) -> None:
    """Remove what other attempts at these files left, after flushing the files to disk with `flush`.

    Flushed at the end, since a file system that flushes one file writes much of the others too.
    """
    names: dict[Path, set[str]] = {}
    for entry in entries:
        path = root / entry.name
        names.setdefault(path.parent, set()).add(path.name)
    for directory, of in names.items():
        if flush:
            for name in of:
                publish.fsync(directory / name)
            publish.fsync(directory)
        for leftover in directory.glob(f".*{transfers.LEFTOVER}*"):
            if leftover.name.rpartition(transfers.LEFTOVER)[0].removeprefix(".") in of:
                leftover.unlink(missing_ok=True)
