"""The chat page in a real, headless Chromium: with a tuned run, and with servers that a test makes up."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hyperpod_ft.data.text.answer_format import AnswerFormat
from hyperpod_ft.runs.run import Run
from hyperpod_ft.serving.http.openai_api import Request
from hyperpod_ft.serving.http.server import Server
from tests.browser import ENTER, ESCAPE, RELEASE, SHIFT, TAB, Browser, browser, installed
from tests.unit.serving import tuned
from tests.unit.serving.conftest import Serving
from tests.unit.serving.http.made_up import MadeUp

pytestmark = pytest.mark.skipif(
    not installed(), reason="chromium and chromedriver are missing; ./scripts/test.sh installs them on Debian"
)
# where to leave pictures of the page, to look at
PICTURES = os.environ.get("HYPERPOD_FT_PAGE_PICTURES")


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


def picture(window: Browser, name: str) -> None:
    if PICTURES:
        window.screenshot(Path(PICTURES) / f"{name}.png")


def open_page(window: Browser, url: str) -> None:
    window.open(f"{url}/")
    window.wait_for(lambda: "Models:" in window.text("#state"))


def ask(window: Browser, keys: str) -> None:
    """With the keyboard alone, and wait for all answers."""
    before = len(window.texts("article"))
    window.type("#question", keys + ENTER)
    window.wait_for(lambda: len(window.texts("article")) > before)
    window.wait_for(lambda: window.run("return document.querySelector('#stop').disabled"))


def test_base_and_tuned_answers_stand_beside_each_other(window: Browser, serving: Serving, tuned_run: Run) -> None:
    window.resize(1000, 700)
    window.requests()
    open_page(window, serving.url)
    window.run(f"document.querySelector('#tokens').value = {tuned.TOKENS}")
    (sample, *_) = json.loads(tuned_run.paths.samples_path.read_text())["prompts"]
    ask(window, tuned.ROWS[0]["instruction"])
    assert window.text("h2") == tuned.ROWS[0]["instruction"]
    assert window.texts("h3") == ["tuned", "base", "mine"]
    shown = window.run("return [...document.querySelectorAll('.text')].map(e => e.textContent)")
    assert shown == [sample["tuned"], sample["base"], sample["tuned"]]
    tops = window.run("return [...document.querySelectorAll('.answers section')].map(e => e.offsetTop)")
    assert len(set(tops)) == 1, "beside each other"
    assert "the same as tuned" in window.texts(".meta")[2] and "tokens" in window.texts(".meta")[0]
    picture(window, "wide")
    assert {url.partition("/v1")[0].rstrip("/") for url in window.requests()} <= {serving.url, "data:,"}
    assert window.complaints() == []


def test_a_narrow_screen_shows_everything(window: Browser, serving: Serving) -> None:
    window.resize(360, 640)
    open_page(window, serving.url)
    window.run(f"document.querySelector('#tokens').value = {tuned.TOKENS}")
    ask(window, "Which command submits a batch script to Slurm, and what does a very-long-word-" + "x" * 60 + " mean?")
    assert window.run("return document.documentElement.scrollWidth") <= 360
    tops = window.run("return [...document.querySelectorAll('.answers section')].map(e => e.offsetTop)")
    assert tops == sorted(set(tops)), "one below the other"
    picture(window, "narrow")
    window.run("document.querySelector('details').open = true")
    assert window.run("return document.documentElement.scrollWidth") <= 360
    picture(window, "narrow-settings")
    assert window.complaints() == []
    window.resize(1000, 700)


def test_every_control_is_reached_by_tab_and_has_a_name(window: Browser, serving: Serving) -> None:
    open_page(window, serving.url)
    window.run("document.querySelector('details').open = true")
    seen = []
    for _ in range(8):
        focused = "const e = document.activeElement; return e.id || e.tagName"
        seen.append(window.run(focused))
        window.press(TAB)
    assert seen == ["question", "ask", "continue", "SUMMARY", "system", "temperature", "tokens", seen[7]]
    names = "return [...document.querySelectorAll('input, textarea')].map(e => e.labels[0]?.textContent.trim() || '')"
    assert all(window.run(names))


def test_escape_stops_the_answers(window: Browser, start: Callable[..., Server]) -> None:
    def endless(_: Request) -> Iterator[str]:
        yield "word "
        while True:
            threading.Event().wait(0.05)
            yield ""

    server = start(endless)
    open_page(window, f"http://127.0.0.1:{server.port}")
    window.type("#question", "a?" + ENTER)
    window.wait_for(lambda: all("word" in text for text in window.texts(".text")) and window.texts(".text"))
    window.press(ESCAPE)
    window.wait_for(lambda: window.texts(".meta") == ["stopped", "stopped"])
    assert isinstance(server.answers, MadeUp) and server.answers.ended.wait(300)
    picture(window, "stopped")


def test_errors_are_shown_with_their_reason(window: Browser, start: Callable[..., Server]) -> None:
    def failing(request: Request) -> Iterator[str]:
        yield f"<b>{request.model}</b>"
        raise RuntimeError("the device is lost")

    open_page(window, f"http://127.0.0.1:{start(failing).port}")
    ask(window, f"two{SHIFT}{ENTER}{RELEASE}lines")
    assert window.text("h2") == "two\nlines"
    assert window.texts(".text") == ["<b>tuned</b>", "<b>base</b>"], "text, not markup"
    assert all("the device is lost" in error for error in window.texts(".error"))
    picture(window, "errors")


def test_reasoning_stands_before_the_answer(window: Browser, start: Callable[..., Server]) -> None:
    server = start(lambda _: iter(["<think>\nHm, <b>", " so\n</think>", "\n\nYes."]))
    assert isinstance(server.answers, MadeUp)
    server.answers.form = AnswerFormat(reasoning=True)
    open_page(window, f"http://127.0.0.1:{server.port}")
    ask(window, "a?")
    assert window.texts(".reasoning") == ["Hm, <b> so"] * 2 and window.texts(".text") == ["Yes."] * 2
    picture(window, "reasoning")


def test_a_conversation_sends_what_was_said(window: Browser, start: Callable[..., Server]) -> None:
    asked: list[int] = []

    def count(request: Request) -> Iterator[str]:
        asked.append(len(request.messages or ()))
        yield f"answer {len(asked)}"

    open_page(window, f"http://127.0.0.1:{start(count).port}")
    ask(window, "one")
    ask(window, "two")
    window.run("document.querySelector('#continue').click()")
    ask(window, "three")
    window.type("#system", "be brief") if window.run(
        "document.querySelector('details').open = true; return 1"
    ) else None
    ask(window, "four")
    assert asked == [1, 1, 1, 1, 3, 3, 6, 6]


def test_a_key_is_asked_for(window: Browser, start: Callable[..., Server]) -> None:
    server = start(lambda _: iter(["hello"]), api_key="secret")
    window.open(f"http://127.0.0.1:{server.port}/")
    window.wait_for(lambda: "API key" in window.text("#state"))
    window.type("#key", "guess" + ENTER)
    window.run("document.querySelector('#key').value = ''")
    window.type("#key", "secret" + ENTER)
    window.wait_for(lambda: "Models:" in window.text("#state"))
    ask(window, "a?")
    assert window.texts(".text") == ["hello", "hello"]
