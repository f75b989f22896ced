"""Upload files: small ones in one request, large ones in parts that are sent in parallel and appear as a whole.

S3 checks the CRC-32 of each request. An upload that is killed leaves no object; its parts, which are not visible but
which are billed, are removed by the bucket's lifecycle rule (templates/sagemaker/resources.yaml).

Not boto3's `upload_file`, except where it uses AWS's native client: a file that changes while it is read would become
an object, perhaps in place of a good one; an interrupted command would first send the rest of its files; and over TLS
it takes more CPU time (docs/performance.md).
"""

import base64
import contextlib
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from hyperpod_ft.aws.s3 import crt
from hyperpod_ft.aws.s3.listing import DIGEST
from hyperpod_ft.aws.s3.work_queue import Task
from hyperpod_ft.digests import file_xxh3
from hyperpod_ft.errors import UserError

PART_BYTES = 8 << 20
_MAX_PARTS = 10_000  # S3's limit
_MIB = 1 << 20


class Uploads:
    """The uploads of one `push`. Its methods may be called from any thread."""

    def __init__(self, client: Any, bucket: str, sent: Callable[[int], object]) -> None:
        self._client, self._bucket, self._sent = client, bucket, sent
        self._native = crt.is_used(client)
        self._open: set[_Multipart] = set()

    def send(self, path: Path, key: str, digest: str = "") -> Iterator[Task] | None:
        """Send a small file, or begin a large one and return the tasks that send its parts.

        `digest`: the file's XXH3 (128 bits) as hex, if it is known.
        """
        size = path.stat().st_size
        if size <= PART_BYTES:
            content = path.read_bytes()
            self._client.put_object(
                Bucket=self._bucket,
                Key=key,
                Body=content,
                ChecksumCRC32=_crc32(content),
                Metadata={DIGEST: xxhash.xxh3_128_hexdigest(content)},
            )
            self._sent(len(content))
            return None
        if self._native:
            before = path.stat()
            crt.upload(self._client, path, self._bucket, key, {DIGEST: digest or file_xxh3(path)})
            _check_unchanged(path, before)
            self._sent(size)
            return None
        upload = _Multipart(self._client, self._bucket, key, path, digest, self._sent)
        self._open.add(upload)
        return upload.tasks(lambda: self._open.discard(upload))

    def abort(self) -> None:
        """Remove the parts of uploads that are not complete, as far as S3 can be reached."""
        for upload in list(self._open):
            upload.abort()


class _Multipart:
    """One large file. It is read as it is sent, never whole."""

    def __init__(
        self, client: Any, bucket: str, key: str, path: Path, digest: str, sent: Callable[[int], object]
    ) -> None:
        self._client, self._path, self._sent = client, path, sent
        self._status = path.stat()
        self._part_bytes = part_bytes(self._status.st_size)
        self._file = path.open("rb", buffering=0)
        self._place = {"Bucket": bucket, "Key": key}
        self._place["UploadId"] = client.create_multipart_upload(
            **self._place, ChecksumAlgorithm="CRC32", Metadata={DIGEST: digest or file_xxh3(path)}
        )["UploadId"]
        self._parts: dict[int, dict[str, Any]] = {}
        self._counting = threading.Lock()

    def tasks(self, completed: Callable[[], object]) -> Iterator[Task]:
        begins = range(0, self._status.st_size, self._part_bytes)

        def send(number: int, begin: int) -> None:
            part = self._send_part(number, begin)
            with self._counting:
                self._parts[number] = part
                last = len(self._parts) == len(begins)
            if last:
                self._complete()
                completed()

        return (partial(send, number, begin) for number, begin in enumerate(begins, 1))

    def abort(self) -> None:
        self._file.close()
        with contextlib.suppress(Exception):
            self._client.abort_multipart_upload(**self._place)

    def _send_part(self, number: int, begin: int) -> dict[str, Any]:
        content = os.pread(self._file.fileno(), self._part_bytes, begin)
        crc32 = _crc32(content)
        answer = self._client.upload_part(**self._place, PartNumber=number, Body=content, ChecksumCRC32=crc32)
        self._sent(len(content))
        return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumCRC32": crc32}

    def _complete(self) -> None:
        self._file.close()
        _check_unchanged(self._path, self._status)
        parts = [self._parts[number] for number in sorted(self._parts)]
        self._client.complete_multipart_upload(**self._place, MultipartUpload={"Parts": parts})


def _check_unchanged(path: Path, before: os.stat_result) -> None:
    status = path.stat()
    if (status.st_size, status.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise UserError(f"{path}: changed while it was uploaded", "run the command again")


def part_bytes(size: int) -> int:
    """The size of a part of a file of `size` bytes: whole MiB, and not more parts than S3 takes."""
    return max(PART_BYTES, -(-size // _MAX_PARTS // _MIB) * _MIB)


def _crc32(content: bytes) -> str:
    return base64.b64encode(zlib.crc32(content).to_bytes(4, "big")).decode()
