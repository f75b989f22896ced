"""The HTTP server: OpenAI's paths, those of a SageMaker container, and the chat page. It does not import torch.

Every request ends with an answer or a JSON error that says why. A client that goes away ends its answer.
"""

import hmac
import json
import secrets
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any, Protocol
from urllib.parse import urlsplit

from hyperpod_ft.errors import UserError
from hyperpod_ft.serving import openai_api, page
from hyperpod_ft.serving.openai_api import Answer, ApiError, Reply, Request
from hyperpod_ft.terminal import printable

API_KEY = "HYPERPOD_FT_API_KEY"  # the environment variable
_LARGEST_BODY = 6 << 20  # SageMaker's limit of a request
_MOST_ANSWERS = 32  # at once: each keeps keys and values of its tokens in memory
_IDLE_SECONDS = 60.0  # how long a client may be silent, or read nothing
_CHAT: dict[str, bool | None] = {"/v1/chat/completions": True, "/v1/completions": False, "/invocations": None}


class Answers(Protocol):
    """What the server asks: `answering.Answering`."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def chats(self) -> bool: ...
    def named(self, name: str) -> str: ...
    def answer(self, request: Request, send: Callable[[str], None]) -> Answer: ...


class ClientGoneError(Exception):
    """The client closed its connection, or reads nothing."""


class Server(ThreadingHTTPServer):
    """Listens from the start, and answers 503 until `answers` is set: loading a model takes minutes."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, title: str, api_key: str | None = None) -> None:
        """Port 0 takes a free one. Raises UserError when it cannot listen there, or only a key would make it safe."""
        refuse_open(host, api_key)
        self.loopback = is_loopback(host)
        self.title, self.api_key = title, api_key
        self.answers: Answers | None = None
        self.started = int(time.time())
        self.places = threading.BoundedSemaphore(_MOST_ANSWERS)
        self.page = page.Page.load()
        try:
            self.address_family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            super().__init__((str(address[0]), int(address[1])), Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"cannot listen on {host}, port {port}: {reason}", "choose another --port") from error

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Of a connection; requests handle their own."""
        del request, client_address
        if not isinstance(sys.exc_info()[1], OSError):
            traceback.print_exc()


class Handler(BaseHTTPRequestHandler):
    """One connection, in a thread of its own."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "hyperpod-ft", ""
    timeout = _IDLE_SECONDS
    disable_nagle_algorithm = True
    wbufsize = -1  # one packet for head and body; streams flush

    def do_GET(self) -> None:
        self._respond(self._get)

    def do_POST(self) -> None:
        self._respond(self._post)

    def do_HEAD(self) -> None:
        self._respond(self._get)

    def _respond(self, handle: Callable[[str], None]) -> None:
        """Every error becomes JSON with its status; one amid a stream has become an event before."""
        self._begun = time.monotonic()
        self._sent = False
        try:
            self._check_sender()
            handle(urlsplit(self.path).path)
        except ApiError as error:
            self._send_error(error)
        except (ClientGoneError, OSError):
            self.close_connection = True
            self._log("client gone")
        except Exception as error:
            traceback.print_exc()
            self._send_error(ApiError(500, f"{type(error).__name__}: {error}"))

    def _check_sender(self) -> None:
        """Refuse what a page of another site in the user's browser sends. Raises ApiError (403)."""
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        origin = self.headers.get("Origin")
        # a name that resolves to this machine makes a foreign page one of this server's own
        if self.server.loopback and not is_loopback(host or "localhost"):
            raise ApiError(403, f"Host {host}: this server is only for localhost")
        if origin and urlsplit(origin).netloc != self.headers.get("Host"):
            raise ApiError(403, f"Origin {origin}: this server answers only its own page")

    def _get(self, path: str) -> None:
        if path == "/":
            self._send_page()
        elif path in ("/health", "/ping"):
            self._ready()
            self._send_json(200, {"status": "ready"})
        elif path == "/v1/models":
            self._check_key()
            cards = [self._card(name) for name in self._ready().names]
            self._send_json(200, {"object": "list", "data": cards})
        elif path.startswith("/v1/models/"):
            self._check_key()
            self._send_json(200, self._card(self._ready().named(path.removeprefix("/v1/models/"))))
        else:
            raise self._unknown(path)

    def _card(self, name: str) -> dict[str, Any]:
        return openai_api.model_card(name, self.server.started, chat=self._ready().chats)

    def _post(self, path: str) -> None:
        body = self._body()
        if path not in _CHAT:
            raise self._unknown(path)
        self._check_key()
        answers = self._ready()
        request = openai_api.parse(body, chat=_CHAT[path])
        name = answers.named(request.model)
        reply = Reply(secrets.token_hex(12), int(time.time()), name, request.messages is not None)
        if not self.server.places.acquire(blocking=False):
            raise ApiError(429, f"busy with {_MOST_ANSWERS} answers; ask again later", "busy")
        try:
            answer = (self._stream if request.stream else self._whole)(answers, request, reply)
        finally:
            self.server.places.release()
        self._log(f"{name} {answer.prompt_tokens}+{answer.completion_tokens} tokens")

    def _whole(self, answers: Answers, request: Request, reply: Reply) -> Answer:
        def check(_: str) -> None:
            if self._client_is_gone():
                raise ClientGoneError

        answer = answers.answer(request, check)
        self._send_json(200, reply.whole(answer), logged=False)
        return answer

    def _stream(self, answers: Answers, request: Request, reply: Reply) -> Answer:
        """The head is sent with the first piece, so that a question that is refused gets its own status."""

        def send(text: str) -> None:
            if self._client_is_gone():
                raise ClientGoneError
            if not self._sent:
                self._begin_stream()
                if first := reply.first():
                    self._send_chunk(openai_api.event(first))
            if text:
                self._send_chunk(openai_api.event(reply.piece(text)))

        answer = answers.answer(request, send)
        self._send_chunk(openai_api.event(reply.last(answer)))
        if request.include_usage:
            self._send_chunk(openai_api.event(reply.usage(answer)))
        self._send_chunk(openai_api.END_OF_STREAM)
        self._send_chunk(b"")
        return answer

    def _ready(self) -> Answers:
        if self.server.answers is None:
            raise ApiError(503, "the model is still being loaded; ask again in a few seconds", "loading")
        return self.server.answers

    def _check_key(self) -> None:
        expected = f"Bearer {self.server.api_key}".encode()
        given = self.headers.get("Authorization", "").encode("latin-1")  # as http.server decodes it
        if self.server.api_key and not hmac.compare_digest(given, expected):
            raise ApiError(401, f"wrong or missing API key: send the server's {API_KEY}", "invalid_api_key")

    def _unknown(self, path: str) -> ApiError:
        known = [*_CHAT, "/v1/models", "/health", "/ping", "/"]
        return ApiError(404, f"{self.command} {printable(path)}: unknown; there are {', '.join(known)}", "not_found")

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            self.close_connection = True
            raise ApiError(411, "the request has no Content-Length")
        if int(length) > _LARGEST_BODY:
            self.close_connection = True
            raise ApiError(413, f"the request has {length} bytes; at most {_LARGEST_BODY} are read")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ClientGoneError
        return body

    def _client_is_gone(self) -> bool:
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        try:
            return bool(poll.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _send_page(self) -> None:
        content = self.server.page.render(self.server.title)
        self._send_head(200, "text/html; charset=utf-8", len(content), self.server.page.headers)
        self._send_body(content)

    def _send_json(self, status: int, value: Any, *, logged: bool = True) -> None:
        content = json.dumps(value, ensure_ascii=False).encode()
        self._send_head(status, "application/json", len(content))
        self._send_body(content)
        if logged and self.path not in ("/ping", "/health"):
            self._log(str(status))

    def _send_body(self, content: bytes) -> None:
        if self.command != "HEAD":
            self.wfile.write(content)
        self.wfile.flush()

    def _send_head(
        self, status: int, content_type: str, length: int | None, more: dict[str, str] | None = None
    ) -> None:
        self._sent = True
        self.send_response_only(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if length is None:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(length))
        if self.close_connection:
            self.send_header("Connection", "close")
        for name, value in (more or {}).items():
            self.send_header(name, value)
        self.end_headers()

    def _begin_stream(self) -> None:
        self._send_head(200, "text/event-stream; charset=utf-8", None)

    def _send_chunk(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
        self.wfile.flush()

    def _send_error(self, error: ApiError) -> None:
        self._log(f"{error.status} {error.message}")
        try:
            if self._sent:
                # without [DONE]
                self._send_chunk(openai_api.event(error.as_dict()))
                self._send_chunk(b"")
            else:
                self._send_json(error.status, error.as_dict(), logged=False)
        except OSError:
            self.close_connection = True

    def _log(self, outcome: str) -> None:
        seconds = time.monotonic() - self._begun
        line = f"{time.strftime('%T')}  {self.command} {self.path}  {outcome}  {seconds:.2f} s"
        print(printable(line), file=sys.stderr, flush=True)

    def log_message(self, format: str, *args: Any) -> None:
        """Of malformed requests only."""
        print(printable(format % args), file=sys.stderr, flush=True)


def refuse_open(host: str, api_key: str | None) -> None:
    """Raise UserError when others could reach the server, and no key keeps them out."""
    if not is_loopback(host) and not api_key:
        raise UserError(
            f"--host {host}: anyone who reaches this machine could ask the model",
            f"set {API_KEY} to a secret of your choice, which clients then send as their API key",
        )


def url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
