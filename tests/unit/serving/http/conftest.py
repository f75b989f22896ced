"""Servers of made-up answers."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hyperpod_ft.serving.http.openai_api import Request
from hyperpod_ft.serving.http.server import Server
from tests.unit.serving.http.made_up import MadeUp, two_words


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    started = []

    def make(words: Callable[[Request], Iterator[str]] | None = two_words, **options: Any) -> Server:
        server = Server(**{"host": "127.0.0.1", "port": 0, "title": "a <run>"} | options)
        server.answers = MadeUp(words) if words else None
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        started.append(server)
        return server

    yield make
    for server in started:
        server.shutdown()
        server.server_close()
