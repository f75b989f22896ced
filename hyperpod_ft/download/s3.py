"""Amazon S3 as a source: every object at or below a URI. boto3 finds the credentials."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyperpod_ft.aws.s3 import trees
from hyperpod_ft.aws.session import Session, explained
from hyperpod_ft.download.listing import File, Listing
from hyperpod_ft.errors import UserError


@dataclass(frozen=True)
class S3:
    """`s3://bucket/prefix`: a directory of objects, or one object."""

    where: str  # the run file's key, for errors
    uri: str
    _session: Session = field(default_factory=Session, repr=False, compare=False)

    def listing(self) -> Listing:
        with self._client() as client:
            found = trees.listing(client, self.uri)
        if not found:
            raise UserError(f"{self.where}: no objects at {self.uri}", "correct the bucket or prefix")
        return Listing(tuple(File(entry.name, entry.size) for entry in found))

    def fetch(self, listing: Listing, directory: Path) -> None:
        wanted = {file.name for file in listing.files}
        with self._client() as client:
            found = [entry for entry in trees.listing(client, self.uri) if entry.name in wanted]
            trees.pull_entries(client, self.uri, directory, found)

    @contextlib.contextmanager
    def _client(self) -> Iterator[Any]:
        """A client; errors name the run file's key."""
        try:
            with explained(f"cannot read {self.uri}"):
                yield self._session.client("s3", connections=trees.CONNECTIONS)
        except UserError as error:
            raise UserError(f"{self.where}: {error.problem}", error.remedy) from error
