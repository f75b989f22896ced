"""Requests of the OpenAI API: what is read, what is refused and why, and the JSON of answers."""

import json
from typing import Any

import pytest

from hyperpod_ft.serving.http import openai_api
from hyperpod_ft.serving.http.openai_api import Answer, HttpError, Reply, parse
from hyperpod_ft.serving.markup.parts import Content, Reasoning, ToolCall


def body(**values: Any) -> bytes:
    return json.dumps(values).encode()


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}]
ASKED = [{"role": "user", "content": "a?"}]


def test_a_question_without_settings_is_answered_greedily() -> None:
    request = parse(body(messages=ASKED), chat=True)
    assert request.messages == ({"role": "user", "content": "a?"},)
    assert (request.model, request.temperature, request.top_p, request.max_tokens) == ("", 0.0, 1.0, None)
    assert not request.stream and request.stop == ()


def test_settings_are_read() -> None:
    request = parse(
        body(
            model="base",
            prompt="p",
            max_tokens=3,
            temperature=1,
            top_p=0.5,
            seed=-4,
            stop="END",
            stream=True,
            stream_options={"include_usage": True},
            user="ignored",
            n=1,
            tools=None,
            tool_choice="none",
        ),
        chat=False,
    )
    assert (request.model, request.prompt, request.max_tokens, request.seed) == ("base", "p", 3, -4)
    assert (request.temperature, request.top_p, request.stop) == (1.0, 0.5, ("END",))
    assert request.stream and request.stream_options.include_usage


def test_the_newer_name_of_the_limit_counts() -> None:
    assert parse(body(messages=ASKED, max_completion_tokens=5, max_tokens=7), chat=True).max_tokens == 5


@pytest.mark.parametrize(("given", "read"), [("p", "p"), (["p"], "p"), ([1, 2], (1, 2)), ([[1, 2]], (1, 2))])
def test_prompts(given: object, read: object) -> None:
    assert parse(body(prompt=given), chat=False).prompt == read


def test_a_chat_is_given_to_its_template_as_it_is() -> None:
    called = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": called, "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "2"},
    ]
    request = parse(
        body(messages=messages, tools=TOOLS, reasoning_effort="low", chat_template_kwargs={"enable_thinking": False}),
        chat=True,
    )
    assert list(request.messages or ()) == messages and list(request.callable_tools) == TOOLS
    assert request.template_kwargs == {"reasoning_effort": "low", "enable_thinking": False}
    assert parse(body(messages=ASKED, tools=TOOLS, tool_choice="none"), chat=True).callable_tools == ()


def test_sagemakers_path_takes_both() -> None:
    assert parse(body(messages=ASKED), chat=None).messages
    assert parse(body(prompt="p"), chat=None).prompt == "p"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"{", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b"[1]", "object"),
        (body(), "messages"),
        (body(messages=[]), "messages"),
        (body(messages=["a"]), r"messages\.0"),
        (body(messages=[*ASKED, {"role": "assistant", "content": "b"}]), "assistant"),
        (body(messages=ASKED, model=3), "model"),
        (body(messages=ASKED, stream="yes"), "stream"),
        (body(messages=ASKED, stream_options=[1]), "stream_options"),
        (body(messages=ASKED, max_tokens=0), "max_tokens"),
        (body(messages=ASKED, max_tokens=True), "max_tokens"),
        (body(messages=ASKED, temperature=3), "temperature"),
        (body(messages=ASKED, temperature=1e-45), "temperature: must be 0"),
        (body(messages=ASKED, temperature=9e-7), "temperature: must be 0"),
        (b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}', "temperature"),
        (body(messages=ASKED, seed=1 << 64), "seed"),
        (body(messages=ASKED, stop=[1]), "stop"),
        (body(messages=ASKED, n=2), "n:"),
        (body(messages=ASKED, logprobs=True), "logprobs"),
        (body(messages=ASKED, functions=[{"name": "f"}]), "functions"),
        (body(messages=ASKED, tools={}), "tools"),
        (body(messages=ASKED, tools=["f"]), r"tools\.0"),
        (body(messages=ASKED, tools=[*TOOLS, {"type": "web_search"}]), r"tools\.1: must be \{"),
        (body(messages=ASKED, tools=[{"type": "function", "function": {}}]), r"tools\.0: function\.name"),
        (
            body(messages=ASKED, tools=[{"type": "function", "function": {"name": "f", "parameters": "x"}}]),
            r"tools\.0: function\.parameters",
        ),
        (body(messages=ASKED, tools=TOOLS, tool_choice="required"), "tool_choice: must be auto or none"),
        (
            body(messages=ASKED, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "f"}}),
            "tool_choice: must be auto or none",
        ),
        (body(messages=ASKED, reasoning_effort=3), "reasoning_effort"),
        (body(messages=ASKED, chat_template_kwargs=[]), "chat_template_kwargs"),
    ],
)
def test_what_is_wrong_is_named(content: bytes, named: str) -> None:
    with pytest.raises(HttpError, match=named) as caught:
        parse(content, chat=True)
    assert caught.value.status == 400 and caught.value.as_dict()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("given", [None, "", [], ["a", "b"], [1.5], [-1], [True], 7])
def test_what_is_no_prompt(given: object) -> None:
    with pytest.raises(HttpError, match="prompt"):
        parse(body(prompt=given), chat=False)


@pytest.mark.parametrize(
    "given", [{"tools": TOOLS}, {"chat_template_kwargs": {"a": 1}}, {"reasoning_effort": "low"}], ids=str
)
def test_a_prompt_has_no_template_to_tell(given: dict[str, Any]) -> None:
    with pytest.raises(HttpError, match=f"{next(iter(given))}: only for messages"):
        parse(body(prompt="p", **given), chat=False)


def test_an_answer_of_each_kind() -> None:
    answer = Answer((Content("te"), Content("xt")), True, 3, 2)
    chat = Reply("1", 5, "tuned", chat=True)
    assert chat.whole(answer)["choices"][0]["message"] == {"role": "assistant", "content": "text"}
    assert chat.whole(answer)["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    completion = Reply("1", 5, "tuned", chat=False)
    assert completion.whole(answer)["choices"][0]["text"] == "text" and completion.first() is None
    piece = openai_api.event(completion.piece(Content("é\n"), 0))
    assert piece.startswith(b"data: {") and b"\n" not in openai_api.event({})[:-2]


def test_an_answer_that_calls_tools_says_so() -> None:
    parts = (Reasoning("hm"), ToolCall("f", '{"a": 1}'), ToolCall("g", "{}"))
    reply = Reply("1", 5, "tuned", chat=True)
    (choice,) = reply.whole(Answer(parts, True, 3, 2))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "call_1_0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            {"id": "call_1_1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }
    assert reply.whole(Answer(parts, False, 3, 2))["choices"][0]["finish_reason"] == "length"
    assert reply.whole(Answer((), True, 3, 0))["choices"][0]["message"]["content"] == ""
