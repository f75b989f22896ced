"""A client's connection: bodies read with a limit, JSON and event streams written, errors as JSON with a reason.

Who may ask: programs on this machine, or whoever has the server's API key; no page of another site.
"""

import abc
import hmac
import json
import select
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from hyperpod_ft.errors import UserError, printable
from hyperpod_ft.serving.http import openai_api
from hyperpod_ft.serving.http.openai_api import HttpError

API_KEY = "HYPERPOD_FT_API_KEY"  # the environment variable
_MAX_BODY_BYTES = 6 << 20  # SageMaker's limit of a request
_IDLE_SECONDS = 60.0  # how long a client may be silent, or read nothing
_QUIET = ("/ping", "/health")  # asked every few seconds: not logged


def refuse_open(host: str, api_key: str | None) -> None:
    """Raise UserError when others could reach a server on `host`, and no key keeps them out."""
    if not is_loopback(host) and not api_key:
        raise UserError(
            f"--host {host}: anyone who reaches this machine could ask the model",
            f"set {API_KEY} to a secret of your choice, which clients then send as their API key",
        )


def check_key(api_key: str | None, authorization: str) -> None:
    """Raise HttpError (401) unless the header `authorization`, as http.server decodes it, has the key."""
    expected = f"Bearer {api_key}".encode()
    if api_key and not hmac.compare_digest(authorization.encode("latin-1"), expected):
        raise HttpError(401, f"wrong or missing API key: send the server's {API_KEY}", "invalid_api_key")


def check_site(loopback: bool, host: str, origin: str) -> None:
    """Raise HttpError (403) for what a page of another site sends from the user's browser, (400) for malformed headers.

    `host` and `origin` are headers; `loopback`: the server listens on this machine only.
    """
    try:
        name = urlsplit(f"//{host}").hostname or "localhost"
        site = urlsplit(origin).netloc
    except ValueError as error:  # brackets without an address in them
        raise HttpError(400, f"Host {host}, Origin {origin or '-'}: {error}") from error
    # a name that resolves to this machine would make a foreign page one of this server's own
    if loopback and not is_loopback(name):
        raise HttpError(403, f"Host {host}: this server is only for localhost")
    if origin and site != host:
        raise HttpError(403, f"Origin {origin}: this server answers only its own page")


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class ClientGoneError(Exception):
    """The client closed its connection."""


class Connection(BaseHTTPRequestHandler, abc.ABC):
    """One connection, in its own thread. Subclasses answer requests with `get` and `post`, which get the path."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "hyperpod-ft", ""
    timeout = _IDLE_SECONDS
    disable_nagle_algorithm = True
    wbufsize = -1  # one packet for head and body; streams flush
    _begun = 0.0  # seconds, of the monotonic clock
    _sent = False  # whether the head of the response was

    @abc.abstractmethod
    def get(self, path: str) -> None: ...

    @abc.abstractmethod
    def post(self, path: str) -> None: ...

    def do_GET(self) -> None:
        self._respond(self.get)

    def do_HEAD(self) -> None:
        self._respond(self.get)

    def do_POST(self) -> None:
        self._respond(self.post)

    def _respond(self, answer: Callable[[str], None]) -> None:
        self._begun, self._sent = time.monotonic(), False
        # until the body is read, no further request can follow
        self.close_connection = self.close_connection or "Content-Length" in self.headers
        try:
            try:
                path = urlsplit(self.path).path
            except ValueError:  # such as "http://[x"
                raise HttpError(400, "the request's path is not a URL") from None
            answer(path)
        except HttpError as error:
            self._fail(error)
        except (ClientGoneError, OSError):
            self.close_connection = True
            self.log("client gone")
        except Exception as error:
            traceback.print_exc()
            self._fail(HttpError(500, f"{type(error).__name__}: {error}"))

    def body(self) -> bytes:
        """Raises HttpError for one without a length, or longer than the limit."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise HttpError(411, "the request has no Content-Length")
        if len(length) > len(str(_MAX_BODY_BYTES)) or int(length) > _MAX_BODY_BYTES:
            raise HttpError(413, f"the request has {length[:20]} bytes; the limit is {_MAX_BODY_BYTES}")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ClientGoneError
        self.close_connection = self.headers.get("Connection", "").lower() == "close"
        return body

    def check_client(self) -> None:
        """Raise ClientGoneError when it has closed the connection."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        if poll.poll(0) and not self.connection.recv(1, socket.MSG_PEEK):
            raise ClientGoneError

    def send(self, status: int, content_type: str, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        self._send_head(status, content_type, {"Content-Length": str(len(content)), **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(content)
        self.wfile.flush()

    def send_json(self, status: int, value: Any) -> None:
        self.send(status, "application/json", json.dumps(value, ensure_ascii=False).encode())

    def begin_stream(self) -> bool:
        """Send the head of an event stream, the first time; whether this was it."""
        if self._sent:
            return False
        self._send_head(200, "text/event-stream; charset=utf-8", {"Transfer-Encoding": "chunked"})
        return True

    def send_chunk(self, content: bytes) -> None:
        """A part of a stream; an empty one ends it."""
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
        self.wfile.flush()

    def _send_head(self, status: int, content_type: str, headers: Mapping[str, str]) -> None:
        self._sent = True
        self.send_response_only(status)
        fixed = {"Content-Type": content_type, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        for name, value in (fixed | dict(headers)).items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def _fail(self, error: HttpError) -> None:
        self.log(f"{error.status} {error.message}")
        try:
            if self._sent:
                # without [DONE]
                self.send_chunk(openai_api.event(error.as_dict()))
                self.send_chunk(b"")
            else:
                self.send_json(error.status, error.as_dict())
        except OSError:
            self.close_connection = True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server itself refuses: malformed requests, and other methods."""
        del explain
        self._begun, self._sent, self.close_connection = time.monotonic(), False, True
        self._fail(HttpError(int(code), message or "malformed request"))

    def log(self, outcome: str) -> None:
        path = getattr(self, "path", "")
        if path in _QUIET:
            return
        seconds = time.monotonic() - self._begun
        line = f"{time.strftime('%T')}  {self.command} {path}  {outcome}  {seconds:.2f} s"
        print(printable(line), file=sys.stderr, flush=True)


class Listener(ThreadingHTTPServer):
    """Listens from the start."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        """Port 0 takes a free one. Raises UserError when it cannot listen there."""
        try:
            self.address_family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            super().__init__((str(address[0]), int(address[1])), handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"cannot listen on {host}, port {port}: {reason}", "choose another --port") from error

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of a connection's error unless the client caused it; requests handle their own errors."""
        del request, client_address
        if not isinstance(sys.exc_info()[1], OSError):
            traceback.print_exc()
