"""Download objects in ranges, several in parallel, under a temporary name until the content is verified.

The temporary name has the object's ETag: a further attempt, or another process, writes the same bytes to it.
"""

import http.client
import io
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hyperpod_ft import publish
from hyperpod_ft.aws.s3 import crt
from hyperpod_ft.aws.s3.listing import DIGEST, Entry
from hyperpod_ft.aws.s3.work_queue import Task
from hyperpod_ft.aws.session import error_code
from hyperpod_ft.digests import stream_xxh3
from hyperpod_ft.errors import UserError

RANGE_BYTES = 16 << 20
_BLOCK_BYTES = 1 << 20
_ATTEMPTS = 5


class ObjectReplacedError(UserError):
    """An object was replaced after it was listed."""


class Downloads:
    """The downloads of one `pull`. Its methods may be called from any thread."""

    def __init__(self, client: Any, bucket: str, received: Callable[[int], object]) -> None:
        self._client, self._bucket, self._received = client, bucket, received
        self._native = crt.is_used(client)
        self._begun: list[_Download] = []

    def close(self) -> None:
        """Close the files of downloads that are not complete."""
        for download in self._begun:
            download.close()

    def fetch(self, entry: Entry, final: Path) -> Iterator[Task] | None:
        """Fetch a small object, or return the tasks that fetch the ranges of a large one."""
        download = _Download(self, entry, final)
        self._begun.append(download)
        if entry.size <= RANGE_BYTES:
            download.fetch(0)
            return None
        if self._native:
            download.fetch_whole(self._client, self._bucket)
            self._received(entry.size)
            return None
        begins = range(0, entry.size, RANGE_BYTES)
        return (partial(download.fetch, begin) for begin in begins)

    def read(self, entry: Entry, begin: int, end: int, file: int) -> str:
        """Write bytes [begin, end) of an object to `file`, in place; returns the digest in its metadata."""
        wanted = {"Bucket": self._bucket, "Key": entry.key, "IfMatch": entry.etag}
        if (begin, end) != (0, entry.size):
            wanted["Range"] = f"bytes={begin}-{end - 1}"
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                answer = self._client.get_object(**wanted)
                at = begin
                while block := answer["Body"].read(_BLOCK_BYTES):
                    at += os.pwrite(file, block, at)
                self._received(end - begin)
                return str(answer["Metadata"].get(DIGEST, ""))
            except self._client.exceptions.ClientError as error:
                if error_code(error) == "PreconditionFailed":
                    raise _replaced(entry) from error
                raise
            except _interruptions() as error:
                if attempt == _ATTEMPTS:
                    raise UserError(
                        f"{entry.name}: the connection broke {_ATTEMPTS} times ({type(error).__name__})",
                        "check the network and run the command again",
                    ) from error
        raise AssertionError


class _Download:
    """One object on its way to a file."""

    def __init__(self, downloads: Downloads, entry: Entry, final: Path) -> None:
        self._downloads, self._entry, self._final = downloads, entry, final
        final.parent.mkdir(parents=True, exist_ok=True)
        self._partial = partial_of(final, entry)
        self._file = self._open()
        self._left = entry.size
        self._counting = threading.Lock()

    def fetch(self, begin: int) -> None:
        """Fetch the range that begins there; after the last one, verify the file and give it its name."""
        end = min(begin + RANGE_BYTES, self._entry.size)
        digest = self._downloads.read(self._entry, begin, end, self._file.fileno())
        with self._counting:
            self._left -= end - begin
            last = not self._left
        if last:
            self._finish(digest)

    def fetch_whole(self, client: Any, bucket: str) -> None:
        """Fetch the object with AWS's native client, which creates a new file."""
        self.close()
        crt.download(client, bucket, self._entry.key, self._partial)
        self._file = self._open()
        described = client.head_object(Bucket=bucket, Key=self._entry.key)
        if described["ETag"] != self._entry.etag:  # boto3's `download_file` does not take IfMatch
            self._partial.unlink(missing_ok=True)
            raise _replaced(self._entry)
        self._finish(str(described["Metadata"].get(DIGEST, "")))

    def close(self) -> None:
        self._file.close()

    def _open(self) -> io.FileIO:
        # not truncated or extended: another process may be writing the same bytes, and the size says how many
        return io.FileIO(os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")

    def _finish(self, digest: str) -> None:
        self._file.seek(0)
        arrived = stream_xxh3(self._file)
        self.close()
        if digest and arrived != digest:
            self._partial.unlink(missing_ok=True)
            raise UserError(
                f"{self._entry.key}: its digest differs from the one recorded at upload",
                "run the command again; if it repeats, the object is damaged: upload it again",
            )
        try:
            self._partial.replace(self._final)
        except FileNotFoundError:
            # another process fetched the same object and was faster
            if not self._final.exists():
                raise


def finish(root: Path, entries: Collection[Entry], *, flush: bool) -> None:
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
        for leftover in directory.glob(".*.partial"):
            if leftover.name.removesuffix(".partial").rpartition(".")[0].removeprefix(".") in of:
                leftover.unlink(missing_ok=True)


def partial_of(final: Path, entry: Entry) -> Path:
    """Where an object is stored until it is complete; the name depends on the content."""
    return final.with_name(f".{final.name}.{re.sub(r'[^0-9a-zA-Z-]', '', entry.etag)}.partial")


def _replaced(entry: Entry) -> ObjectReplacedError:
    return ObjectReplacedError(f"{entry.name}: was replaced while it was read", "run the command again")


def _interruptions() -> tuple[type[Exception], ...]:
    """What reading a response raises when its connection breaks."""
    from botocore import exceptions  # noqa: PLC0415 - boto3 belongs to an extra
    from urllib3.exceptions import ProtocolError, ReadTimeoutError  # noqa: PLC0415

    return (
        exceptions.IncompleteReadError,
        exceptions.ReadTimeoutError,
        exceptions.ResponseStreamingError,
        ConnectionError,
        TimeoutError,
        http.client.IncompleteRead,
        ProtocolError,
        ReadTimeoutError,
    )
