"""Amazon S3: every object at or below a URI, several in parallel, each in ranges by boto3's transfer."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyperpod_ft.aws.session import Session, explained
from hyperpod_ft.download.listing import File, Listing
from hyperpod_ft.errors import UserError

_PARALLEL_FILES = 4
_CONNECTIONS = 50  # boto3's transfer opens 10 per file
_ALLOW = "allow s3:ListBucket and s3:GetObject to the nodes' role"
_REMEDIES = {
    "NoSuchBucket": "correct the bucket's name",
    "AccessDenied": _ALLOW,
    "403": _ALLOW,  # of a HEAD request, whose response has no body
    "AllAccessDisabled": _ALLOW,
}


@dataclass(frozen=True)
class S3:
    """`s3://bucket/prefix`: a directory of objects, or one object. boto3 finds the credentials."""

    where: str  # the run file's key, for errors
    uri: str
    _session: Session = field(default_factory=Session, repr=False, compare=False)

    @property
    def _bucket(self) -> str:
        return self.uri.removeprefix("s3://").partition("/")[0]

    @property
    def _prefix(self) -> str:
        return self.uri.removeprefix("s3://").partition("/")[2].rstrip("/")

    def listing(self) -> Listing:
        with self._explained():
            pages = self._client.get_paginator("list_objects_v2")
            found = [
                File(name, entry["Size"], origin=entry["Key"], modified=entry["LastModified"].timestamp())
                for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix)
                for entry in page.get("Contents", [])
                if (name := self._name(entry["Key"]))
            ]
        if not found:
            raise UserError(f"{self.where}: no objects at {self.uri}", "correct the bucket or prefix")
        return Listing(tuple(sorted(found, key=lambda file: file.name)))

    def _name(self, key: str) -> str:
        """An object's name relative to the prefix; empty if not below it (`llama-2` is not below `llama`)."""
        if key.endswith("/"):
            return ""  # a console's "folder"
        if not self._prefix:
            return key
        if key == self._prefix:
            return key.rpartition("/")[2]
        return key.removeprefix(f"{self._prefix}/") if key.startswith(f"{self._prefix}/") else ""

    def fetch(self, listing: Listing, directory: Path) -> None:
        with self._explained(), ThreadPoolExecutor(_PARALLEL_FILES) as pool:
            client = self._client
            started = [pool.submit(self._fetch_one, client, file, directory) for file in listing.files]
            try:
                for transfer in started:
                    transfer.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _fetch_one(self, client: Any, file: File, directory: Path) -> None:
        target = directory / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        # boto3 writes to a temporary name and renames: a file of this name is complete, but may be of an older object.
        if target.is_file():
            status = target.stat()
            if status.st_size == file.size and status.st_mtime >= file.modified:
                return
        client.download_file(self._bucket, file.origin, str(target))

    @property
    def _client(self) -> Any:
        return self._session.client("s3", connections=_CONNECTIONS)

    def _explained(self) -> AbstractContextManager[None]:
        return explained(f"{self.where}: cannot read {self.uri}", _REMEDIES)
