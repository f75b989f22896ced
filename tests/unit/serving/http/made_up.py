"""Answers that a test makes up, for the server."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hyperpod_ft.data.text.answer_format import AnswerFormat
from hyperpod_ft.serving.http.openai_api import Answer, HttpError, Request
from hyperpod_ft.serving.markup.parts import Part
from hyperpod_ft.serving.markup.stream import MarkupStream


@dataclass
class MadeUp:
    """Answers with the words that `words` yields, read as those of a model."""

    words: Callable[[Request], Iterator[str]]
    ended: threading.Event = field(default_factory=threading.Event)
    names: tuple[str, ...] = ("tuned", "base")
    chats: bool = True
    failure: str = ""
    form: AnswerFormat = field(default_factory=AnswerFormat)

    def named(self, name: str) -> str:
        if name not in ("", *self.names):
            raise HttpError(404, f"no {name}", "model_not_found")
        return name or "tuned"

    def answer(self, request: Request, send: Callable[[Sequence[Part]], None]) -> Answer:
        markup = MarkupStream(self.form, request.callable_tools)
        found: list[Part] = []
        count = 0
        try:
            for word in self.words(request):
                count += 1
                found += (parts := markup.feed(word, last=False))
                send(parts)
            found += (parts := markup.feed("", last=True))
            send(parts)
        finally:
            self.ended.set()
        return Answer(tuple(found), True, 1, count)


def two_words(_: Request) -> Iterator[str]:
    yield from ("one ", "two")
