"""A small S3 server for the benchmark: it costs less CPU time than its clients, and so measures them.

    python -m benchmarks.s3_server DIRECTORY      prints its URL once it answers, and ends when its stdin closes

The servers that can be installed (moto, and rclone's, from PyPI) compute an MD5 of each part, and take longer than
every client. This one keeps each part as a file, below a directory that should be in memory: a request's body is
received into the mapped file, and the kernel sends the file. It speaks what the contenders need of S3: put, get, head,
list, delete, and multipart uploads. It checks neither signatures nor checksums. Deleting a bucket deletes its objects.
"""

import hashlib
import itertools
import mmap
import os
import re
import sys
import threading
import uuid
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_MODIFIED = ("2026-01-01T00:00:00.000Z", "Thu, 01 Jan 2026 00:00:00 GMT")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass(frozen=True)
class Stored:
    """An object: its parts in order, each a file and its size."""

    parts: tuple[tuple[Path, int], ...]
    metadata: dict[str, str]

    @property
    def size(self) -> int:
        return sum(size for _, size in self.parts)

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5("".join(path.name for path, _ in self.parts).encode()).hexdigest()}"'  # noqa: S324


@dataclass
class Store:
    """Every object by bucket and key, and the uploads that are not complete."""

    directory: Path
    objects: dict[str, Stored] = field(default_factory=dict)
    uploads: dict[str, tuple[dict[str, str], dict[int, tuple[Path, int]]]] = field(default_factory=dict)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def new_file(self) -> Path:
        return self.directory / f"{next(self._numbers)}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    rbufsize = 1 << 16
    store: Store

    def do_PUT(self) -> None:
        path, query = self._place()
        if "partNumber" in query:
            part = self._receive()
            self.store.uploads[query["uploadId"]][1][int(query["partNumber"])] = part
            self._answer(200, headers={"ETag": f'"{part[0].name}"'})
        elif "/" not in path:
            self._answer(200)  # a bucket
        else:
            stored = Stored((self._receive(),), self._metadata())
            self.store.objects[path] = stored
            self._answer(200, headers={"ETag": stored.etag})

    def do_POST(self) -> None:
        path, query = self._place()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        bucket, _, key = path.partition("/")
        if "uploads" in query:
            upload = uuid.uuid4().hex
            self.store.uploads[upload] = (self._metadata(), {})
            self._answer(
                200,
                f"<InitiateMultipartUploadResult><Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
                f"<UploadId>{upload}</UploadId></InitiateMultipartUploadResult>",
            )
        elif "delete" in query:
            for found in re.findall(rb"<Key>(.*?)</Key>", body):
                self.store.objects.pop(f"{bucket}/{found.decode()}", None)
            self._answer(200, "<DeleteResult/>")
        else:
            metadata, parts = self.store.uploads.pop(query["uploadId"])
            stored = Stored(tuple(parts[number] for number in sorted(parts)), metadata)
            self.store.objects[path] = stored
            self._answer(
                200,
                f"<CompleteMultipartUploadResult><Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
                f"<ETag>{escape(stored.etag)}</ETag></CompleteMultipartUploadResult>",
            )

    def do_HEAD(self) -> None:
        path, _ = self._place()
        found = self.store.objects.get(path)
        if found is None:
            self._answer(404 if "/" in path else 200)
        else:
            self._answer(200, headers=self._described(found), length=found.size)

    def do_DELETE(self) -> None:
        path, _ = self._place()
        for name in [name for name in self.store.objects if name == path or name.startswith(f"{path}/")]:
            for file, _ in self.store.objects.pop(name).parts:
                file.unlink()
        self._answer(204)

    def do_GET(self) -> None:
        path, query = self._place()
        if "/" not in path:
            self._answer(200, "<LocationConstraint/>" if "location" in query else self._listing(path, query))
            return
        found = self.store.objects.get(path)
        if found is None:
            self._answer(404, "<Error><Code>NoSuchKey</Code></Error>")
            return
        begin, end, headers = 0, found.size, self._described(found)
        if wanted := _RANGE.fullmatch(self.headers.get("Range") or ""):
            begin, end = int(wanted[1]), min(int(wanted[2] or found.size - 1) + 1, found.size)
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{found.size}"
        self._answer(206 if wanted else 200, headers=headers, length=end - begin)
        self._send(found, begin, end)

    def _place(self) -> tuple[str, dict[str, str]]:
        split = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(split.query, keep_blank_values=True).items()}
        return unquote(split.path).strip("/"), query

    def _metadata(self) -> dict[str, str]:
        return {name: value for name, value in self.headers.items() if name.lower().startswith("x-amz-meta-")}

    def _described(self, found: Stored) -> dict[str, str]:
        return {"ETag": found.etag, "Last-Modified": _MODIFIED[1], "Accept-Ranges": "bytes", **found.metadata}

    def _receive(self) -> tuple[Path, int]:
        assert "aws-chunked" not in self.headers.get("Content-Encoding", "")
        size, path = int(self.headers["Content-Length"]), self.store.new_file()
        with path.open("w+b") as file:
            if size:
                file.truncate(size)
                with mmap.mmap(file.fileno(), size) as mapped, memoryview(mapped) as view:
                    at = 0
                    while at < size:
                        at += self.rfile.readinto(view[at:])
        return path, size

    def _send(self, found: Stored, begin: int, end: int) -> None:
        at = 0
        for path, size in found.parts:
            first, last = max(begin, at), min(end, at + size)
            if first < last:
                with path.open("rb") as file:
                    offset, left = first - at, last - first
                    while left:
                        sent = os.sendfile(self.connection.fileno(), file.fileno(), offset, left)
                        offset, left = offset + sent, left - sent
            at += size

    def _listing(self, bucket: str, query: dict[str, str]) -> str:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        contents, common = [], set()
        for path, found in sorted(self.store.objects.items()):
            key = path.removeprefix(f"{bucket}/")
            if not path.startswith(f"{bucket}/") or not key.startswith(prefix):
                continue
            if delimiter and delimiter in key[len(prefix) :]:
                common.add(prefix + key[len(prefix) :].partition(delimiter)[0] + delimiter)
                continue
            contents.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>{_MODIFIED[0]}</LastModified>"
                f"<ETag>{escape(found.etag)}</ETag><Size>{found.size}</Size><StorageClass>STANDARD</StorageClass>"
                "</Contents>"
            )
        prefixes = "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(common))
        return (
            f"<ListBucketResult><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>"
            f"<KeyCount>{len(contents)}</KeyCount><MaxKeys>{len(contents)}</MaxKeys>{''.join(contents)}{prefixes}"
            "</ListBucketResult>"
        )

    def _answer(
        self, status: int, body: str = "", headers: dict[str, str] | None = None, length: int | None = None
    ) -> None:
        content = body.encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        if content:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512


def main() -> None:
    Handler.store = Store(Path(sys.argv[1]))
    server = _Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(0)), daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
