"""An HTTP server that answers huggingface_hub as the Hub does: metadata, ranged files, and its error codes."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import unquote, urlsplit

GOOD_TOKEN, OTHER_TOKEN = "hf_tokenWithAccess0123456789", "hf_tokenWithoutAccess0123456789"


@dataclass
class Repository:
    """Files by name; `revisions` besides the commit; `stall_after`: bytes of a file after which nothing more comes."""

    files: dict[str, bytes]
    kind: str = "model"
    commit: str = "c0ffee" + "0" * 34
    revisions: tuple[str, ...] = ("main",)
    gated: bool = False
    claimed: dict[str, int] = field(default_factory=dict)  # sizes the metadata lies about
    stall_after: dict[str, int] = field(default_factory=dict)


@dataclass
class Hub:
    """A started server. `requests` holds (method, path, Range header) of every request."""

    url: str
    repositories: dict[str, Repository]
    requests: list[tuple[str, str, str]] = field(default_factory=list)

    def fetched(self) -> list[tuple[str, str]]:
        """Name and Range header of every file request, in order."""
        files = [(path, ranges) for method, path, ranges in self.requests if method == "GET" and "/resolve/" in path]
        return [(path.split("/resolve/")[1].split("/", 1)[1], ranges) for path, ranges in files]


class _RefusedError(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.status, self.code, self.message = status, code, message


@contextmanager
def serve(repositories: dict[str, Repository]) -> Iterator[Hub]:
    class Handler(_Handler):
        pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Handler.hub = hub = Hub(f"http://127.0.0.1:{server.server_address[1]}", repositories)
    Handler.ended = ended = threading.Event()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: ClassVar[Hub]
    ended: ClassVar[threading.Event]

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        try:
            if tree := re.fullmatch(r"/api/(model|dataset)s/(.+?)/tree/([^/]+)", path):
                self._tree(*tree.groups())
            elif api := re.fullmatch(r"/api/(model|dataset)s/(.+?)(?:/revision/(.+))?", path):
                self._information(*api.groups())
            elif file := re.fullmatch(r"/(datasets/)?(.+)/resolve/([^/]+)/(.+)", path):
                self._file("dataset" if file[1] else "model", file[2], file[3], file[4])
            else:
                raise _RefusedError(404)
        except _RefusedError as refusal:
            self.send_response(refusal.status)
            if refusal.code:
                self.send_header("X-Error-Code", refusal.code)
            self.send_header("X-Error-Message", refusal.message)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _repository(self, kind: str, name: str, revision: str | None) -> Repository:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in ("", GOOD_TOKEN, OTHER_TOKEN):
            raise _RefusedError(401, message="Invalid credentials in Authorization header")
        found = self.hub.repositories.get(name)
        if found is None or found.kind != kind:
            # what the Hub says to someone it does not know, and to someone it does
            raise _RefusedError(404, "RepoNotFound") if token else _RefusedError(401, "RepoNotFound")
        if revision not in (None, found.commit, *found.revisions):
            raise _RefusedError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return found

    def _information(self, kind: str, name: str, revision: str | None) -> None:
        found = self._repository(kind, name, revision)
        siblings = [
            {"rfilename": name, "size": found.claimed.get(name, len(content)), "blobId": "0" * 40}
            for name, content in found.files.items()
        ]
        self._json({"_id": "1", "id": name, "sha": found.commit, "siblings": siblings})

    def _tree(self, kind: str, name: str, revision: str) -> None:
        """What huggingface_hub 2.x lists a snapshot's files by; older versions take the siblings."""
        files = self._repository(kind, name, revision).files
        self._json(
            [{"type": "file", "path": path, "size": len(content), "oid": "0" * 40} for path, content in files.items()]
        )

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, kind: str, name: str, revision: str, file: str) -> None:
        found = self._repository(kind, name, revision)
        if found.gated and GOOD_TOKEN not in self.headers.get("Authorization", ""):
            raise _RefusedError(403 if "Authorization" in self.headers else 401, "GatedRepo", "Access is restricted")
        if file not in found.files:
            raise _RefusedError(404, "EntryNotFound")
        content = found.files[file]
        first = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or [0, 0])[1])
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - first))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", found.commit)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if self.command == "GET":
            self._send(content[first:], found.stall_after.get(file, len(content)) - first)

    def _send(self, content: bytes, allowed: int) -> None:
        try:
            self.wfile.write(content[: max(allowed, 0)])
            self.wfile.flush()
            if allowed < len(content):
                self.ended.wait(60)
        except OSError:
            pass  # the client was killed: what the test wants
