"""Where assets come from, by kind: Amazon S3 and local directories; hub.py has the Hugging Face Hub."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hyperpod_ft.aws.s3 import trees
from hyperpod_ft.aws.s3.objects import Entry
from hyperpod_ft.aws.session import Session, explained
from hyperpod_ft.config import sources
from hyperpod_ft.config.sources import Asset
from hyperpod_ft.digests import files_below
from hyperpod_ft.download.listing import File, FileSource, Listing
from hyperpod_ft.errors import UserError
from hyperpod_ft.publish import remove
from hyperpod_ft.runs.assets import Kind

# Errors of link(): other file system, too many links, links not supported, file of another owner.
_NO_LINK = (errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.EPERM, errno.EACCES)


@dataclass(frozen=True)
class S3:
    """`s3://bucket/prefix`: a directory of objects, or one object."""

    where: str  # the run file's key, for errors
    uri: str
    _session: Session = field(default_factory=Session, repr=False, compare=False)

    def listing(self) -> Listing:
        if not self._entries:
            raise UserError(f"{self.where}: no objects at {self.uri}", "correct the bucket or prefix")
        return Listing(tuple(File(entry.name, entry.size, etag=entry.etag) for entry in self._entries))

    def fetch(self, listing: Listing, directory: Path) -> None:
        wanted = {file.name for file in listing.files}
        with self._client() as client:
            trees.pull_entries(client, self.uri, directory, [entry for entry in self._entries if entry.name in wanted])

    @cached_property
    def _entries(self) -> list[Entry]:
        with self._client() as client:
            return trees.listing(client, self.uri)

    @contextlib.contextmanager
    def _client(self) -> Iterator[Any]:
        """A client; errors name the run file's key."""
        try:
            with explained(f"cannot read {self.uri}"):
                yield self._session.client("s3")
        except UserError as error:
            raise UserError(f"{self.where}: {error.problem}", error.remedy) from error


@dataclass(frozen=True)
class Local:
    """A file or directory at `asset.source`."""

    where: str
    asset: Asset

    @property
    def _path(self) -> Path:
        return Path(self.asset.source)

    def listing(self) -> Listing:
        """Raises UserError when the path no longer exists, or its content has changed since the run was planned."""
        now = sources.resolve(self.where, self.asset.source, None, Path("/"))
        if self.asset.revision and now.revision != self.asset.revision:
            raise UserError(
                f"{self.where}: {self._path} changed since the run was submitted", "submit the run file again"
            )
        return Listing(tuple(self._file(path) for path in files_below(self._path)))

    def _file(self, path: Path) -> File:
        name = path.name if path == self._path else path.relative_to(self._path).as_posix()
        return File(name, path.stat().st_size, origin=str(path))

    def fetch(self, listing: Listing, directory: Path) -> None:
        for file in listing.files:
            _link_or_copy(Path(file.origin).resolve(), directory / file.name)

    def needs_space(self, directory: Path) -> bool:
        """Whether files must be copied into `directory`."""
        return self._path.stat().st_dev != directory.stat().st_dev


def _link_or_copy(origin: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    remove(target)  # perhaps an incomplete copy of an earlier attempt
    # files that a person may edit in place are copied: a link would change with them
    if origin.stat().st_size <= sources.SMALL_FILE_BYTES:
        shutil.copyfile(origin, target)
        return
    try:
        os.link(origin, target)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        shutil.copyfile(origin, target)


def source_of(kind: Kind, where: str, asset: Asset) -> FileSource:
    """`where` is the run file's key, for errors."""
    if asset.kind == "hub":
        from hyperpod_ft.download.hub import Hub  # noqa: PLC0415 - takes half a second, needed for this source only

        return Hub(where, kind, asset)
    return S3(where, asset.source) if asset.kind == "s3" else Local(where, asset)
