"""Push files of a directory to an S3 location, and pull them: only those that differ, each verified by its digest.

`client` is boto3's for s3, with as many connections as transfers are to run in parallel. A file has the key
`<prefix>/<its path below the root>`. Objects that were not asked for are never touched. Every function raises UserError
for what a user can correct.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hyperpod_ft.aws.s3 import listing as objects
from hyperpod_ft.aws.s3 import worker_processes
from hyperpod_ft.aws.s3.download import Downloads, finish
from hyperpod_ft.aws.s3.errors import explained_s3
from hyperpod_ft.aws.s3.listing import Entry
from hyperpod_ft.aws.s3.location import Location, check_name
from hyperpod_ft.aws.s3.upload import Uploads
from hyperpod_ft.aws.s3.work_queue import Task, run_all
from hyperpod_ft.digests import file_xxh3
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import ByteProgress

CONNECTIONS = 16  # S3 gives each about 90 MB/s


def listing(client: Any, url: str, prefix: str = "") -> list[Entry]:
    """Every file at or below `prefix`, a name relative to `url`, sorted by name."""
    with explained_s3(url, "read"):
        return objects.entries(client, Location.of(url), prefix)


def listed(client: Any, url: str, names: Iterable[str]) -> list[Entry]:
    """The files of these names that exist, sorted by name."""
    with explained_s3(url, "read"):
        found = objects.entries_named(client, Location.of(url), names)
    return [found[name] for name in sorted(found)]


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

        def send_all(share: Sequence[str], threads: int, sent: Callable[[int], object]) -> None:
            uploads = Uploads(client, location.bucket, sent)

            def send(name: str) -> Iterator[Task] | None:
                path, entry = named[name], there.get(name)
                digest, size = digests.get(path, ""), path.stat().st_size
                if entry is not None and entry.size == size:
                    digest = digest or file_xxh3(path)
                    if objects.digest_of(client, location.bucket, entry) == digest:
                        sent(size)
                        return None
                return uploads.send(path, location.key(name), digest)

            try:
                run_all((partial(send, name) for name in share), threads)
            except BaseException:
                uploads.abort()
                raise

        worker_processes.run(
            client, named, lambda name: named[name].stat().st_size, _threads(client), send_all, progress.add
        )


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

    def fetch_all(share: Sequence[Entry], threads: int, received: Callable[[int], object]) -> None:
        downloads = Downloads(client, location.bucket, received)

        def fetch(entry: Entry) -> Iterator[Task] | None:
            if is_there(client, location.bucket, entry, root / entry.name):
                received(entry.size)
                return None
            return downloads.fetch(entry, root / entry.name)

        try:
            run_all((partial(fetch, entry) for entry in share), threads)
        finally:
            downloads.close()

    with explained_s3(url, "read"):
        worker_processes.run(client, entries, lambda entry: entry.size, _threads(client), fetch_all, received)
        finish(root, entries, flush=flush)


def is_there(client: Any, bucket: str, entry: Entry, path: Path) -> bool:
    """Whether a file has an object's content."""
    if not path.is_file() or path.stat().st_size != entry.size:
        return False
    if digest := objects.digest_of(client, bucket, entry):
        return file_xxh3(path) == digest
    return path.stat().st_mtime >= entry.modified


def _threads(client: Any) -> int:
    return min(CONNECTIONS, int(client.meta.config.max_pool_connections))
