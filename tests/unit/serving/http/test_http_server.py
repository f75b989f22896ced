"""The HTTP server with answers that a test makes up: paths, errors, keys, foreign pages, and clients that go away."""

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from hyperpod_ft.errors import UserError
from hyperpod_ft.serving.http import server as servers
from hyperpod_ft.serving.http.connection import API_KEY
from hyperpod_ft.serving.http.openai_api import HttpError, Request
from hyperpod_ft.serving.http.server import Server
from tests.unit.serving.http.made_up import MadeUp
from tests.waiting import wait_for

CHAT = "/v1/chat/completions"
QUESTION = json.dumps({"messages": [{"role": "user", "content": "a?"}]})
JSON = {"Content-Type": "application/json"}


def endless(_: Request) -> Iterator[str]:
    while True:
        yield "x"


def ask(server: Server, method: str, path: str, content: str | None = None, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, content, JSON | named)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, json.loads(text) if response.headers["Content-Type"] == "application/json" else text


def client(server: Server, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=key, max_retries=0, timeout=300)


def message_of(found: Any) -> str:
    return str(found["error"]["message"])


def test_openais_client_gets_answers(start: Callable[..., Server]) -> None:
    asking = client(start())
    assert [model.id for model in asking.models.list()] == ["tuned", "base"]
    answer = asking.chat.completions.create(model="base", messages=[{"role": "user", "content": "a?"}])
    assert answer.model == "base" and answer.choices[0].message.content == "one two"
    pieces = asking.chat.completions.create(model="", messages=[{"role": "user", "content": "a?"}], stream=True)
    deltas = [piece.choices[0].delta.content for piece in pieces]
    assert deltas == ["", "one ", "two", None]
    texts = [piece.choices[0].text for piece in asking.completions.create(model="tuned", prompt="p", stream=True)]
    assert texts == ["one ", "two", ""]
    with pytest.raises(openai.NotFoundError, match="no other"):
        asking.models.retrieve("other")


def test_sagemakers_paths(start: Callable[..., Server]) -> None:
    server = start()
    assert ask(server, "GET", "/ping")[0] == 200
    assert ask(server, "POST", "/invocations", QUESTION)[1]["choices"][0]["message"]["content"] == "one two"
    assert ask(server, "POST", "/invocations", '{"prompt": "p"}')[1]["choices"][0]["text"] == "one two"
    assert "data: [DONE]" in ask(server, "POST", "/invocations", '{"prompt": "p", "stream": true}')[1]


def test_a_path_that_is_no_url_is_the_clients_mistake(start: Callable[..., Server]) -> None:
    with socket.create_connection(("127.0.0.1", start().port), timeout=300) as connection:
        connection.sendall(b"GET http://[x HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        assert connection.makefile("rb").readline().split()[1] == b"400"


def test_before_the_models_are_loaded_it_says_so(start: Callable[..., Server]) -> None:
    server = start(None)
    for method, path in (("GET", "/ping"), ("GET", "/health"), ("GET", "/v1/models"), ("POST", CHAT)):
        status, found = ask(server, method, path, QUESTION if method == "POST" else None)
        assert status == 503 and "loaded" in message_of(found)
    assert ask(server, "GET", "/")[0] == 200, "the page waits for them"


def test_a_lost_device_is_reported_to_whoever_watches(start: Callable[..., Server]) -> None:
    server = start()
    assert isinstance(server.answers, MadeUp)
    server.answers.failure = "CUDA error: device-side assert triggered"
    for method, path in (("GET", "/ping"), ("GET", "/health"), ("POST", CHAT), ("POST", "/invocations")):
        status, found = ask(server, method, path, QUESTION if method == "POST" else None)
        assert status == 500 and "restart the server: CUDA error: device-side assert" in message_of(found)


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "named"),
    [
        ("GET", "/nope", None, 404, "/v1/models"),
        ("POST", "/nope", "{}", 404, CHAT),
        ("GET", CHAT, None, 404, CHAT),
        ("POST", CHAT, "{", 400, "JSON"),
        ("POST", CHAT, "{}", 400, "messages"),
        ("POST", CHAT, '{"model": "x", "messages": [{"role": "user", "content": "a"}]}', 404, "no x"),
    ],
)
def test_errors_are_json_with_a_reason(
    start: Callable[..., Server], method: str, path: str, content: str | None, status: int, named: str
) -> None:
    found = ask(start(), method, path, content)
    assert found[0] == status and named in message_of(found[1])


def test_an_error_before_the_first_word_has_its_status(start: Callable[..., Server]) -> None:
    def words(request: Request) -> Iterator[str]:
        if request.stream:
            raise HttpError(400, "too long")
        raise RuntimeError("the device is lost")
        yield ""

    server = start(words)
    status, found = ask(server, "POST", CHAT, QUESTION)
    assert status == 500 and "RuntimeError: the device is lost" in message_of(found)
    status, found = ask(server, "POST", CHAT, QUESTION[:-1] + ', "stream": true}')
    assert status == 400 and message_of(found) == "too long"


def test_an_error_amid_a_stream_reaches_the_client(start: Callable[..., Server]) -> None:
    def words(_: Request) -> Iterator[str]:
        yield "one"
        raise RuntimeError("the device is lost")

    stream = client(start(words)).completions.create(model="", prompt="p", stream=True)
    assert next(stream).choices[0].text == "one"
    with pytest.raises(openai.APIError, match="the device is lost"):
        next(stream)


@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_client_that_goes_away_ends_its_answer(start: Callable[..., Server], stream: str) -> None:
    begun = threading.Event()

    def words(request: Request) -> Iterator[str]:
        begun.set()
        return endless(request)

    server = start(words)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        content = QUESTION[:-1] + f', "stream": {stream}}}'
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nContent-Length: {len(content)}\r\n\r\n{content}".encode())
        assert begun.wait(300)
        if stream == "true":
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
    assert isinstance(server.answers, MadeUp) and server.answers.ended.wait(300)
    wait_for(lambda: server.answer_slots._value == servers._MAX_ANSWERS, what="its place is free")


def test_a_client_that_reads_nothing_ends_its_answer(
    start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers.Handler, "timeout", 2.0)  # for the question too
    server = start(endless)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        content = QUESTION[:-1] + ', "stream": true}'
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nContent-Length: {len(content)}\r\n\r\n{content}".encode())
        assert isinstance(server.answers, MadeUp) and server.answers.ended.wait(300)


def test_more_questions_than_places_are_told_to_wait(
    start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, entered = threading.Event(), threading.Event()

    def words(_: Request) -> Iterator[str]:
        entered.set()
        assert go_on.wait(300)
        yield "done"

    monkeypatch.setattr(servers, "_MAX_ANSWERS", 1)
    server = start(words)
    found: list[tuple[int, Any]] = []
    first = threading.Thread(target=lambda: found.append(ask(server, "POST", CHAT, QUESTION)))
    first.start()
    assert entered.wait(300)
    status, busy = ask(server, "POST", CHAT, QUESTION)
    assert status == 429 and "later" in message_of(busy)
    go_on.set()
    first.join(300)
    assert found[0][0] == 200
    while not server.answer_slots._value:  # given back just after the answer
        threading.Event().wait(0.001)
    assert ask(server, "POST", CHAT, QUESTION)[0] == 200


def test_a_key_is_asked_for(start: Callable[..., Server]) -> None:
    server = start(api_key="sésame")
    for key in ("", "Bearer wrong", "Basic sésame"):
        headers = {"Authorization": key.encode("utf-8").decode("latin-1")} if key else {}
        assert ask(server, "GET", "/v1/models", **headers)[0] == 401
        status, found = ask(server, "POST", CHAT, QUESTION, **headers)
        assert status == 401 and API_KEY in message_of(found)
    right = "Bearer sésame".encode().decode("latin-1")
    assert ask(server, "POST", CHAT, QUESTION, Authorization=right)[0] == 200
    assert ask(server, "GET", "/ping")[0] == 200


def test_only_a_key_opens_it_to_others() -> None:
    with pytest.raises(UserError, match=r"--host 0\.0\.0\.0: .*HYPERPOD_FT_API_KEY"):
        Server("0.0.0.0", 0, "title")
    Server("0.0.0.0", 0, "title", "key").server_close()


def test_a_port_that_is_taken(start: Callable[..., Server]) -> None:
    with pytest.raises(UserError, match=r"port \d+: .*; choose another --port"):
        Server("127.0.0.1", start().port, "title")


def test_pages_of_other_sites_are_refused(start: Callable[..., Server]) -> None:
    server = start()
    own = f"127.0.0.1:{server.port}"
    assert ask(server, "POST", CHAT, QUESTION, Origin=f"http://{own}")[0] == 200
    assert ask(server, "POST", CHAT, QUESTION, Host="localhost:9000", Origin="http://localhost:9000")[0] == 200
    for headers in ({"Origin": "https://example.com"}, {"Origin": "null"}, {"Host": "evil.example:80"}):
        status, found = ask(server, "POST", CHAT, QUESTION, **headers)
        assert status == 403 and message_of(found)
    for headers in ({"Host": "["}, {"Host": own, "Origin": "http://[x]"}):
        status, found = ask(server, "POST", CHAT, QUESTION, **headers)
        assert status == 400 and "Host" in message_of(found)


def test_bodies_are_bounded(start: Callable[..., Server]) -> None:
    server = start()
    with socket.create_connection(("127.0.0.1", server.port), timeout=300) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nContent-Length: 999999999\r\n\r\n".encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413")
    with socket.create_connection(("127.0.0.1", server.port), timeout=300) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\n\r\n".encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 411")


@pytest.mark.parametrize("request_line", ["PUT / HTTP/1.1", "OPTIONS * HTTP/1.1", "nonsense", "GET / HTTP/9.9"])
def test_what_http_itself_refuses_is_json_too(start: Callable[..., Server], request_line: str) -> None:
    with socket.create_connection(("127.0.0.1", start().port), timeout=300) as connection:
        connection.sendall(f"{request_line}\r\n\r\n".encode())
        connection.shutdown(socket.SHUT_WR)
        found = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert json.loads(found.partition(b"\r\n\r\n")[2] or found)["error"]["message"]


def test_a_body_that_was_not_read_is_no_request(start: Callable[..., Server]) -> None:
    with socket.create_connection(("127.0.0.1", start(api_key="key").port), timeout=300) as connection:
        hidden = "GET / HTTP/1.1\r\n\r\n"
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nContent-Length: {len(hidden)}\r\n\r\n{hidden}".encode())
        found = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert found.startswith(b"HTTP/1.1 401") and found.count(b"HTTP/1.1") == 1


def test_a_connection_answers_several_requests(start: Callable[..., Server]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", start().port, timeout=300)
    for _ in range(3):
        connection.request("POST", CHAT, QUESTION)
        used = connection.sock
        assert connection.getresponse().read() and connection.sock is used is not None


def test_the_page_may_load_nothing_else(start: Callable[..., Server]) -> None:
    server = start()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    connection.request("GET", "/")
    response = connection.getresponse()
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "'sha256-" in policy
    text = response.read().decode()
    assert "a &lt;run&gt;" in text and "{{" not in text
    assert "http://" not in text and "https://" not in text
