"""Files to objects and back: small ones in one request each, large ones by boto3's transfer manager, in parallel parts.

On the instance types with the fastest networks (p4d, p5, p6, trn1.32xlarge, ...) boto3 takes AWS's native client
(package awscrt) by itself. That ignores the endpoint that a client was given, always uses TLS, and cannot connect to an
endpoint with a port: so only for AWS's own endpoints.

S3 checks the CRC-32 of each request. An upload that is killed leaves no object; its parts, which are not visible but
which are billed, are removed by the bucket's lifecycle rule (templates/sagemaker/resources.yaml).
"""

import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import xxhash

from hyperpod_ft.aws.s3.objects import DIGEST, Entry, ObjectReplacedError, digest_of
from hyperpod_ft.aws.session import CONNECTIONS, error_code, redacted
from hyperpod_ft.digests import file_xxh3
from hyperpod_ft.errors import UserError

LARGE_BYTES = 8 << 20
_AT_ONCE = CONNECTIONS // 2  # files; boto3's manager has as many requests at once
_CHECKSUM = "CRC32"
LEFTOVER = ".partial-s3-"  # in the name of a file that is not complete, after a dot and its name

Item = TypeVar("Item")


class Transfers:
    """The transfers of one push or pull. `upload` and `download` are for the threads of `run`.

    `moved` is given the bytes as they go, and a negative number of those that have to go again.
    """

    def __init__(self, client: Any, bucket: str, moved: Callable[[int], object]) -> None:
        self._client, self._bucket, self._moved = client, bucket, moved
        self._manager = _manager(client)
        self._stopped = threading.Event()
        self._sending: dict[str, tuple[Path, os.stat_result]] = {}  # large files as they were before, by key

    def run(self, transfer: Callable[[Item], object], items: Iterable[Item]) -> None:
        """Call `transfer` with each item, in threads. The first error, or an interrupt, ends all; raises it."""
        with ThreadPoolExecutor(_AT_ONCE) as pool, self._checking(), self._manager:
            tasks = [pool.submit(transfer, item) for item in items]
            try:
                for task in as_completed(tasks):
                    task.result()
            except BaseException:
                self._stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def upload(self, path: Path, key: str, digest: str = "") -> None:
        """Make an object of a file. Raises UserError when a large one changes meanwhile: there is no object then,
        except with AWS's native client.

        `digest`: the file's XXH3 (128 bits) as hex, if it is known.
        """
        status = path.stat()
        if status.st_size < LARGE_BYTES:
            content = path.read_bytes()
            metadata = {DIGEST: xxhash.xxh3_128_hexdigest(content)}
            self._client.put_object(
                Bucket=self._bucket, Key=key, Body=content, Metadata=metadata, ChecksumAlgorithm=_CHECKSUM
            )
            self._moved(len(content))
            return
        self._sending[key] = path, status
        extra = {"Metadata": {DIGEST: digest or file_xxh3(path)}, "ChecksumAlgorithm": _CHECKSUM}
        following = _Following(self._moved)
        with _explained(path.name):
            self._wait(self._manager.upload(str(path), self._bucket, key, extra, [following]), following)
        self._check_unchanged(key)  # the native client calls no hook

    def download(self, entry: Entry, final: Path) -> None:
        """Make a file of an object, which appears when it is complete and verified.

        Raises ObjectReplacedError when the object is no longer the listed one.
        """
        final.parent.mkdir(parents=True, exist_ok=True)
        partial = final.with_name(f".{final.name}{LEFTOVER}{secrets.token_hex(4)}")
        digest: str | None = None  # in the object's metadata; empty without one
        try:
            with _explained(entry.name):
                digest = self._fetch_small(entry, partial)
                if digest is None:
                    digest = digest_of(self._client, self._bucket, entry)
                    following = _Following(self._moved, entry)
                    self._wait(
                        self._manager.download(self._bucket, entry.key, str(partial), {}, [following]), following
                    )
            if digest and file_xxh3(partial) != digest:
                raise UserError(
                    f"{entry.key}: its digest differs from the one recorded at upload",
                    "run the command again; if it repeats, the object is damaged: upload it again",
                )
            partial.replace(final)
        except FileNotFoundError:
            # another process fetched the same object, was faster, and removed what it took for a leftover
            if not final.exists() or final.stat().st_size != entry.size or (digest and file_xxh3(final) != digest):
                raise
        finally:
            partial.unlink(missing_ok=True)

    def _fetch_small(self, entry: Entry, partial: Path) -> str | None:
        """Fetch a small object in one request; returns its digest. None when it is large, or that failed."""
        from s3transfer.utils import S3_RETRYABLE_DOWNLOAD_ERRORS  # noqa: PLC0415 - boto3 belongs to an extra

        if entry.size >= LARGE_BYTES:
            return None
        with suppress(*S3_RETRYABLE_DOWNLOAD_ERRORS):  # then the manager tries, several times
            answer = self._client.get_object(Bucket=self._bucket, Key=entry.key, IfMatch=entry.etag)
            partial.write_bytes(answer["Body"].read())
            self._moved(entry.size)
            return str(answer["Metadata"].get(DIGEST, ""))
        return None

    def _wait(self, future: Any, following: "_Following") -> None:
        if self._stopped.is_set():
            future.cancel()  # it may have begun after all others were cancelled
        future.result()
        following.done.wait()  # the native client's file has its name only then

    @contextmanager
    def _checking(self) -> Iterator[None]:
        """Check each large file before its parts become an object, and send no part after an interrupt."""
        events = self._client.meta.events

        def check(params: dict[str, Any], **_: Any) -> None:
            self._check_unchanged(params["Key"])
            self._sending.pop(params["Key"], None)  # what happens to the file now does not matter

        def stop(**_: Any) -> None:
            if self._stopped.is_set():
                raise InterruptedError  # botocore would try a cancelled part twice more, after seconds

        hooks = {"before-parameter-build.s3.CompleteMultipartUpload": check, "request-created.s3.UploadPart": stop}
        for event, hook in hooks.items():
            events.register(event, hook)
        try:
            yield
        finally:
            for event, hook in hooks.items():
                events.unregister(event, hook)

    def _check_unchanged(self, key: str) -> None:
        if key in self._sending:
            path, before = self._sending[key]
            status = path.stat()
            if (status.st_size, status.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                raise UserError(f"{path}: changed while it was uploaded", "run the command again")


class _Following:
    """What boto3's manager calls during one transfer: a subscriber, as it names it."""

    def __init__(self, moved: Callable[[int], object], entry: Entry | None = None) -> None:
        self._moved, self._entry = moved, entry
        self.done = threading.Event()

    def on_queued(self, future: Any, **_: Any) -> None:
        if self._entry:
            # not passed to `download`, which would refuse it
            future.meta.call_args.extra_args["IfMatch"] = self._entry.etag
            if hasattr(future.meta, "provide_transfer_size"):  # not of the native client
                future.meta.provide_transfer_size(self._entry.size)
                future.meta.provide_object_etag(self._entry.etag)

    def on_progress(self, bytes_transferred: int, **_: Any) -> None:
        self._moved(bytes_transferred)

    def on_done(self, **_: Any) -> None:
        self.done.set()


def _manager(client: Any) -> Any:
    from boto3.s3.transfer import TransferConfig, create_transfer_manager  # noqa: PLC0415 - boto3 belongs to an extra

    endpoint = urlsplit(client.meta.endpoint_url)
    of_aws = endpoint.port is None and (endpoint.hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))
    # few large pieces: Python's threads wait for each other at each; those that are not written yet are in memory
    config = TransferConfig(
        multipart_threshold=LARGE_BYTES,
        multipart_chunksize=2 * LARGE_BYTES,
        io_chunksize=1 << 20,
        max_io_queue=16,
        preferred_transfer_client="auto" if of_aws else "classic",
    )
    return create_transfer_manager(client, config)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Errors that are not botocore's, as UserError. `name`: the file's."""
    from s3transfer.exceptions import S3DownloadFailedError  # noqa: PLC0415 - boto3 belongs to an extra

    try:
        yield
    except Exception as error:
        if isinstance(error, S3DownloadFailedError) or error_code(error) in ("PreconditionFailed", "412"):
            raise ObjectReplacedError(f"{name}: was replaced while it was read", "run the command again") from error
        if not type(error).__module__.startswith(("s3transfer.", "awscrt.")):
            raise
        cause = getattr(error, "last_exception", error)
        problem = f"{name}: the transfer failed ({type(cause).__name__}: {redacted(str(cause))})"
        raise UserError(problem, "check the network and run the command again") from error
