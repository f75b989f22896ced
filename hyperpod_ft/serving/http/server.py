"""The HTTP server: OpenAI's paths, those of a SageMaker container, and the chat page. It does not import torch.

Every request ends with an answer or a JSON error that says why. A client that goes away ends its answer.
"""

import html
import re
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from hyperpod_ft.errors import printable
from hyperpod_ft.report.html import content_policy
from hyperpod_ft.serving.http import connection, openai_api
from hyperpod_ft.serving.http.connection import Connection, Listener
from hyperpod_ft.serving.http.openai_api import Answer, HttpError, Reply, Request
from hyperpod_ft.serving.markup.parts import Part, ToolCall

if TYPE_CHECKING:  # it imports torch
    from hyperpod_ft.serving.answers.answering import Answering

_FILE = "page.html"
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True)
class Page:
    """`headers` allow the file's own script and style, by digest, and requests to this server; nothing else."""

    text: str
    headers: dict[str, str]

    @classmethod
    def load(cls) -> "Page":
        text = resources.files(__package__).joinpath(_FILE).read_text(encoding="utf-8")  # also from a zip
        inline = dict(_INLINE.findall(text))
        policy = content_policy({"page.js": inline["script"], "page.css": inline["style"]}, connects=True)
        policy += "; frame-ancestors 'none'"
        return cls(text, {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"})

    def render(self, title: str) -> bytes:
        return self.text.replace("{{ title }}", html.escape(title)).encode()


_MAX_ANSWERS = 32  # at once: each keeps keys and values of its tokens in memory
# Whether a path takes messages; None: as the body says.
_QUESTIONS: dict[str, bool | None] = {"/v1/chat/completions": True, "/v1/completions": False, "/invocations": None}


class Server(Listener):
    """Listens from the start, and answers 503 until `answers` is set: loading a model takes minutes."""

    def __init__(self, host: str, port: int, title: str, api_key: str | None = None) -> None:
        """Port 0 takes a free one. Raises UserError when it cannot listen there, or only a key would make it safe."""
        connection.refuse_open(host, api_key)
        self.loopback = connection.is_loopback(host)
        self.title, self.api_key = title, api_key
        self.answers: Answering | None = None
        self.started = int(time.time())
        self.answer_slots = threading.BoundedSemaphore(_MAX_ANSWERS)
        self.page = Page.load()
        super().__init__(host, port, Handler)


class Handler(Connection):
    """The requests of one connection."""

    server: Server

    def get(self, path: str) -> None:
        self._check_site()
        if path == "/":
            shown = self.server.page
            self.send(200, "text/html; charset=utf-8", shown.render(self.server.title), shown.headers)
        elif path in ("/health", "/ping"):
            self._ready()
            self.send_json(200, {"status": "ready"})
        elif path == "/v1/models":
            self._check_key()
            cards = [self._card(name) for name in self._ready().names]
            self.send_json(200, {"object": "list", "data": cards})
        elif path.startswith("/v1/models/"):
            self._check_key()
            self.send_json(200, self._card(self._ready().named(path.removeprefix("/v1/models/"))))
        else:
            raise self._unknown(path)
        self.log("200")

    def post(self, path: str) -> None:
        self._check_site()
        self._check_key()
        if path not in _QUESTIONS:
            raise self._unknown(path)
        request = openai_api.parse(self.body(), chat=_QUESTIONS[path])
        answers = self._ready()
        name = answers.named(request.model)
        reply = Reply(secrets.token_hex(12), int(time.time()), name, request.messages is not None)
        if not self.server.answer_slots.acquire(blocking=False):
            raise HttpError(429, f"busy with {_MAX_ANSWERS} answers; ask again later", "busy")
        try:
            answer = (self._stream if request.stream else self._whole)(answers, request, reply)
        finally:
            self.server.answer_slots.release()
        self.log(f"{name} {answer.prompt_tokens}+{answer.completion_tokens} tokens")

    def _whole(self, answers: "Answering", request: Request, reply: Reply) -> Answer:
        answer = answers.answer(request, lambda _: self.check_client())
        self.send_json(200, reply.whole(answer))
        return answer

    def _stream(self, answers: "Answering", request: Request, reply: Reply) -> Answer:
        """The head is sent with the first piece, so that a question that is refused gets its own status."""
        calls = 0

        def send(parts: Sequence[Part]) -> None:
            nonlocal calls
            self.check_client()
            if self.begin_stream() and (first := reply.first()):
                self.send_chunk(openai_api.event(first))
            for part in parts:
                self.send_chunk(openai_api.event(reply.piece(part, calls)))
                calls += isinstance(part, ToolCall)

        answer = answers.answer(request, send)
        self.send_chunk(openai_api.event(reply.last(answer)))
        if request.stream_options.include_usage:
            self.send_chunk(openai_api.event(reply.usage(answer)))
        self.send_chunk(openai_api.END_OF_STREAM)
        self.send_chunk(b"")
        return answer

    def _card(self, name: str) -> dict[str, Any]:
        return openai_api.model_card(name, self.server.started, chat=self._ready().chats)

    def _ready(self) -> "Answering":
        if self.server.answers is None:
            raise HttpError(503, "the model is still being loaded; ask again in a few seconds", "loading")
        if failure := self.server.answers.failure:
            raise HttpError(500, f"the device can no longer be used; restart the server: {failure}", "device_lost")
        return self.server.answers

    def _check_site(self) -> None:
        connection.check_site(self.server.loopback, self.headers.get("Host", ""), self.headers.get("Origin", ""))

    def _check_key(self) -> None:
        connection.check_key(self.server.api_key, self.headers.get("Authorization", ""))

    def _unknown(self, path: str) -> HttpError:
        known = [*_QUESTIONS, "/v1/models", "/health", "/ping", "/"]
        return HttpError(404, f"{self.command} {printable(path)}: unknown; known: {', '.join(known)}", "not_found")
