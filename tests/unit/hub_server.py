"""An HTTP server that answers huggingface_hub as the Hub does: metadata, ranged files, uploads, and its error codes.

Uploads take the LFS protocol, not Xet: tests set HF_HUB_DISABLE_XET.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
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
    private: bool = False

    def oid(self, name: str) -> str | None:
        """What the Hub compares an upload's file with: SHA-256 of a large one, git's own of any other."""
        content = self.files.get(name)
        if content is None or is_large(name):
            return content and hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0%s" % (len(content), content), usedforsecurity=False).hexdigest()


def is_large(name: str) -> bool:
    """Whether the Hub stores the file as a large one: its default .gitattributes."""
    return name.endswith(".safetensors")


@dataclass
class Hub:
    """A started server. `requests` holds (method, path, Range header) of every request."""

    url: str
    repositories: dict[str, Repository]
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    large: dict[str, bytes] = field(default_factory=dict)  # uploaded content by its SHA-256, committed or not
    stalling: set[str] = field(default_factory=set)  # uploads, by SHA-256, whose answer never comes
    commits: list[list[dict[str, Any]]] = field(default_factory=list)  # the operations of each

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

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self._body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        try:
            if self.command in ("POST", "PUT"):
                self._write(path)
            elif tree := re.fullmatch(r"/api/(model|dataset)s/(.+?)/tree/([^/]+)", path):
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
        self._json({"_id": "1", "id": name, "sha": found.commit, "siblings": siblings, "private": found.private})

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

    def _write(self, path: str) -> None:
        """What an upload asks, in this order: create, the way of each file, large files, commit."""
        if large := re.fullmatch(r"/lfs/([0-9a-f]{64})", path):
            self._store(large[1])
            return
        if self.headers.get("Authorization") != f"Bearer {GOOD_TOKEN}":
            raise _RefusedError(403, message="You don't have the rights to write")
        if path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            wanted = json.loads(self._body)
            private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
            name = f"{wanted['organization']}/{wanted['name']}"
            self.hub.repositories[name] = Repository({}, commit="0" * 40, private=private)
            self._json({"url": f"{self.hub.url}/{name}", "name": name})
        elif found := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
            repository = self._repository("model", found[1], None)
            self._json({"files": [_way(repository, file) for file in json.loads(self._body)["files"]]})
        elif found := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            self._json({"objects": [self._action(wanted) for wanted in json.loads(self._body)["objects"]]})
        elif found := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            self._commit(self._repository("model", found[1], None), found[1])
        else:
            raise _RefusedError(404)

    def _action(self, wanted: dict[str, Any]) -> dict[str, Any]:
        upload = {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"}}
        return wanted if wanted["oid"] in self.hub.large else {**wanted, "actions": upload}

    def _store(self, oid: str) -> None:
        if oid in self.hub.stalling:
            self.ended.wait(300)
        if hashlib.sha256(self._body).hexdigest() != oid:
            raise _RefusedError(400, message="The content has another digest")
        self.hub.large[oid] = self._body
        self._json({})

    def _commit(self, repository: Repository, name: str) -> None:
        operations = [json.loads(line) for line in self._body.splitlines()]
        files = dict(repository.files)
        for operation in operations[1:]:
            value = operation["value"]
            if operation["key"] == "deletedFile":
                del files[value["path"]]
            elif operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif value["oid"] in self.hub.large:
                files[value["path"]] = self.hub.large[value["oid"]]
            else:
                raise _RefusedError(400, message="A large file was not uploaded")
        self.hub.commits.append(operations)
        repository.files = files
        repository.commit = f"{len(self.hub.commits):040x}"
        self._json({"commitUrl": f"{self.hub.url}/{name}/commit/{repository.commit}", "commitOid": repository.commit})

    def _send(self, content: bytes, allowed: int) -> None:
        try:
            self.wfile.write(content[: max(allowed, 0)])
            self.wfile.flush()
            if allowed < len(content):
                self.ended.wait(300)
        except OSError:
            pass  # the client was killed: what the test wants


def _way(repository: Repository, file: dict[str, Any]) -> dict[str, Any]:
    mode = "lfs" if is_large(file["path"]) else "regular"
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": repository.oid(file["path"])}
