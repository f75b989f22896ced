"""Amazon S3: every object at or below a URI, several at once, each in ranges by boto3's own transfer."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperpod_ft.download.listing import File, Listing
from hyperpod_ft.errors import UserError

_PARALLEL_FILES = 4
_CONNECTIONS = 50  # boto3's transfer opens 10 a file


@dataclass(frozen=True)
class S3:
    """`s3://bucket/prefix`: a directory of objects, or one object. Credentials are boto3's own business."""

    where: str  # the run file's key, for errors
    uri: str

    @property
    def _bucket(self) -> str:
        return self.uri.removeprefix("s3://").partition("/")[0]

    @property
    def _prefix(self) -> str:
        return self.uri.removeprefix("s3://").partition("/")[2].rstrip("/")

    def listing(self) -> Listing:
        with self._explained():
            pages = self._client().get_paginator("list_objects_v2")
            found = [
                File(name, entry["Size"], origin=entry["Key"], modified=entry["LastModified"].timestamp())
                for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix)
                for entry in page.get("Contents", [])
                if (name := self._name(entry["Key"]))
            ]
        if not found:
            raise UserError(f"{self.where}: there is nothing at {self.uri}", "correct the bucket or prefix")
        return Listing(tuple(sorted(found, key=lambda file: file.name)))

    def _name(self, key: str) -> str:
        """An object's name relative to the prefix; empty for what is not below it (`llama-2` beside `llama`)."""
        if key.endswith("/"):
            return ""  # a console's "folder"
        if not self._prefix:
            return key
        if key == self._prefix:
            return key.rpartition("/")[2]
        return key.removeprefix(f"{self._prefix}/") if key.startswith(f"{self._prefix}/") else ""

    def fetch(self, listing: Listing, directory: Path) -> None:
        with self._explained(), ThreadPoolExecutor(_PARALLEL_FILES) as pool:
            client = self._client()
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
        # boto3 writes to another name and renames: a file under this name is whole, but perhaps of an older object.
        if target.is_file():
            status = target.stat()
            if status.st_size == file.size and status.st_mtime >= file.modified:
                return
        client.download_file(self._bucket, file.origin, str(target))

    def _client(self) -> Any:
        try:
            import boto3  # type: ignore[import-untyped, unused-ignore]  # noqa: PLC0415 - only S3 needs it
            from botocore.config import Config  # type: ignore[import-untyped, unused-ignore]  # noqa: PLC0415
        except ImportError as error:
            raise UserError(
                f"{self.where}: {self.uri} needs boto3, which this Python lacks",
                f"install it: {sys.executable} -m pip install 'hyperpod-ft[aws]'",
            ) from error
        return boto3.client("s3", config=Config(max_pool_connections=_CONNECTIONS, retries={"mode": "standard"}))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            from botocore import exceptions  # type: ignore[import-untyped, unused-ignore]  # noqa: PLC0415
        except ImportError:
            yield  # _client says what to do
            return
        try:
            yield
        except exceptions.NoCredentialsError as error:
            raise UserError(
                f"{self.where}: no AWS credentials for {self.uri}", "give the nodes' role access, or export them"
            ) from error
        except exceptions.ClientError as error:
            code = error.response.get("Error", {}).get("Code", "unknown")
            raise UserError(f"{self.where}: S3 answers {code} for {self.uri}", _remedy(code)) from error
        except exceptions.BotoCoreError as error:
            raise UserError(
                f"{self.where}: cannot read {self.uri} ({type(error).__name__})",
                "check network and AWS_REGION, then run the stage again: complete files are kept",
            ) from error


def _remedy(code: str) -> str:
    if code == "NoSuchBucket":
        return "correct the bucket's name"
    if code in ("AccessDenied", "403", "AllAccessDisabled"):
        return "allow s3:ListBucket and s3:GetObject to the nodes' role"
    if code in ("ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken"):
        return "renew the AWS credentials"
    return "run the stage again: complete files are kept"
