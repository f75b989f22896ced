"""Amazon S3 as a source: every object at or below a URI. boto3 finds the credentials."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hyperpod_ft.aws.s3 import trees
from hyperpod_ft.aws.s3.listing import Entry
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
        if not self._entries:
            raise UserError(f"{self.where}: no objects at {self.uri}", "correct the bucket or prefix")
        return Listing(tuple(File(entry.name, entry.size) for entry in self._entries))

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
                yield self._session.client("s3", connections=trees.CONNECTIONS)
        except UserError as error:
            raise UserError(f"{self.where}: {error.problem}", error.remedy) from error
