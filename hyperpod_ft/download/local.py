"""Files on this machine: large ones are hard-linked if possible, all others copied."""

import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ft.config import sources
from hyperpod_ft.config.sources import Asset
from hyperpod_ft.digests import files_below
from hyperpod_ft.download.listing import File, Listing
from hyperpod_ft.errors import UserError
from hyperpod_ft.publish import remove

# Errors of link(): other file system, too many links, links not supported, file of another owner.
_NO_LINK = (errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.EPERM, errno.EACCES)


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
