"""Answers that a test makes up, for the server."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hyperpod_ft.serving.http.openai_api import Answer, HttpError, Request


@dataclass
class MadeUp:
    """Answers with the words that `words` yields."""

    words: Callable[[Request], Iterator[str]]
    ended: threading.Event = field(default_factory=threading.Event)
    names: tuple[str, ...] = ("tuned", "base")
    chats: bool = True
    failure: str = ""

    def named(self, name: str) -> str:
        if name not in ("", *self.names):
            raise HttpError(404, f"no {name}", "model_not_found")
        return name or "tuned"

    def answer(self, request: Request, send: Callable[[str], None]) -> Answer:
        text = ""
        try:
            for word in self.words(request):
                text += word
                send(word)
        finally:
            self.ended.set()
        return Answer(text, "stop", 1, len(text))


def two_words(_: Request) -> Iterator[str]:
    yield from ("one ", "two")
