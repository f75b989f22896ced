"""The handler for DJL Serving with answers that a test makes up. tests/aws/test_endpoints.py has a model answer."""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hyperpod_ft.serving.http.openai_api import Request
from hyperpod_ft.serving.http.server import Server
from tests.unit.serving.http.made_up import MadeUp, two_words

STAND_IN = Path(__file__).parents[3] / "stand_ins/djl_serving"


class EndedError(Exception):
    """Instead of the process's end."""


@pytest.fixture
def djl(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(STAND_IN))
    module = importlib.import_module("hyperpod_ft.serving.djl")

    def end(status: int) -> None:
        raise EndedError(status)

    monkeypatch.setattr(module.os, "_exit", end)
    yield module
    for name in ("djl_python", "hyperpod_ft.serving.djl"):
        del sys.modules[name]


def ask(djl: ModuleType, server: Server, **question: Any) -> Any:
    djl._server = lambda _: server  # type: ignore[attr-defined]
    content = json.dumps({"prompt": "a", **question}).encode()
    return djl.handle(sys.modules["djl_python"].Input({"model_dir": "/model"}, content))


def test_an_answer_that_takes_too_long_is_ended(
    djl: ModuleType, start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, the next ones would wait for what nobody waits for."""

    def endless(_: Request) -> Iterator[str]:
        while True:
            yield "x"

    monkeypatch.setattr(djl, "_ANSWER_SECONDS", 0.2)
    server = start(endless)
    made = ask(djl, server)
    assert made.code == 504
    assert "no answer within 0.2 seconds" in json.loads(next(made.pieces))["error"]["message"]
    assert isinstance(server.answers, MadeUp)
    assert server.answers.ended.wait(60)


@pytest.mark.parametrize("stream", [False, True])
def test_a_lost_device_ends_the_process(djl: ModuleType, start: Callable[..., Server], stream: bool) -> None:
    """The server would only answer errors from then on, and DJL would not notice."""
    server = start()
    answers = server.answers
    assert isinstance(answers, MadeUp)

    def lost(request: Request) -> Iterator[str]:
        yield from two_words(request)
        answers.failure = "CUDA error"
        raise RuntimeError(answers.failure)

    assert json.loads(next(ask(djl, server).pieces))["choices"][0]["text"] == "one two"
    answers.words = lost
    with pytest.raises(EndedError):
        made = ask(djl, server, stream=stream)
        assert b"one" in b"".join(made.pieces)  # what there is of a stream is sent first
        made.finish()
