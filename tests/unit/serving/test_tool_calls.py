"""Conversations with tools and reasoning: `hyperpod-ft serve`, asked by OpenAI's own client."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from hyperpod_ft.data.text import answer_format
from hyperpod_ft.serving import __main__ as serving
from tests.unit.serving import scripted_model
from tests.unit.serving.conftest import Serving, serve

# In the form of Qwen 3's; the end of the prompt tells the model which answer to give.
TEMPLATE = """
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{ message.content }}
{%- for call in message.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if messages[-1].role == 'tool' %}{{ '<|informed|>' if messages[-2].tool_calls[0].function.arguments.city == 'Bern' }}
{%- elif reasoning_effort == 'high' %}<think>
{%- elif enable_thinking is false %}<|hasty|>
{%- elif tools %}<|calling|>
{%- else %}<|plain|>{% endif %}{% endif %}"""
ANSWERS = {
    "<|plain|>": ["I ", "cannot ", "know."],
    "<|hasty|>": ["Ask ", "a ", "friend."],
    "<think>": ["\nWhat do ", "they want?\n", "</think>", "\n\nYour ", "city?"],
    "<|calling|>": [
        *("Let me ", "look.\n", "<tool_call>", '\n{"name": "weather", ', '"arguments": {"city": ', '"Bern"}}\n'),
        *("</tool_call>", "\n<tool_call>", '\n{"name": "time", "argum', 'ents": {}}', "\n</tool_call>\n"),
    ],
    "<|informed|>": ["It ", "rains."],
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "time", "strict": True, "parameters": {"type": "object"}}}
ASKED: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "How is the weather?"}]}]
CALLS = [("weather", {"city": "Bern"}), ("time", {})]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    special = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # as some tokenizers have them
    started = serve(str(scripted_model.save(tmp_path_factory.mktemp("scripted") / "it", TEMPLATE, ANSWERS, special)))
    yield started
    started.process.terminate()
    assert started.process.wait(300) == 0


@pytest.fixture(scope="module")
def client(server: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)


def ask(client: openai.OpenAI, messages: list[Any] = ASKED, **options: Any) -> Any:
    return client.chat.completions.create(model="it", messages=messages, **options).choices[0]


def called(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def test_it_says_how_it_reads_calls(server: Serving) -> None:
    assert "Tool calls: JSON in <tool_call>, as Hermes and Qwen 3 write it; reasoning: in <think>" in server.printed


def test_a_conversation_with_tools(client: openai.OpenAI) -> None:
    choice = ask(client, tools=[WEATHER, TIME])
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
    assert called(choice.message) == CALLS
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == 2 and all(call.type == "function" for call in choice.message.tool_calls)
    said = choice.message.model_dump()
    results = [{"role": "tool", "tool_call_id": number, "name": "weather", "content": "rain"} for number in ids]
    for content in (said["content"], None):
        turn = [*ASKED, said | {"content": content, "reasoning_content": "hm"}, *results]
        answer = ask(client, turn[:-1], tools=[WEATHER, TIME])
        assert (answer.finish_reason, answer.message.content) == ("stop", "It rains.")
        assert not answer.message.tool_calls


def test_openais_client_puts_a_stream_together(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "it", "messages": ASKED, "tools": [WEATHER, TIME]}
    with client.chat.completions.stream(**options) as stream:
        deltas = [event.chunk.choices[0].delta for event in stream if event.type == "chunk"]
        choice = stream.get_final_completion().choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
    assert called(choice.message) == CALLS
    assert [delta.content for delta in deltas if delta.content] == ["Let me", " look."]
    whole = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.index for call in whole] == [0, 1] and all(call.id and call.type == "function" for call in whole)
    assert [json.loads(call.function.arguments) for call in whole] == [arguments for _, arguments in CALLS]


def test_reasoning_is_apart_from_the_answer(client: openai.OpenAI) -> None:
    choice = ask(client, reasoning_effort="high")
    assert choice.message.content == "Your city?" and choice.message.reasoning_content == "What do they want?"
    pieces = client.chat.completions.create(model="it", messages=ASKED, reasoning_effort="high", stream=True)
    deltas = [piece.choices[0].delta.model_dump(exclude_none=True) for piece in pieces]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "What do they want?"
    assert [delta["content"] for delta in deltas if delta.get("content")] == ["Your", " city?"]


def test_the_template_gets_what_the_request_says(client: openai.OpenAI) -> None:
    assert ask(client).message.content == "I cannot know."
    assert ask(client, tools=[WEATHER], tool_choice="none").message.content == "I cannot know."
    hasty = {"chat_template_kwargs": {"enable_thinking": False}}
    assert ask(client, tools=[WEATHER], extra_body=hasty).message.content == "Ask a friend."


def test_a_call_that_is_cut_off_stays_text(client: openai.OpenAI) -> None:
    choice = ask(client, tools=[WEATHER], max_tokens=4)
    assert choice.finish_reason == "length" and not choice.message.tool_calls
    assert choice.message.content == 'Let me look.\n<tool_call>\n{"name": "weather",'


def test_a_prompt_is_continued_as_it_stands(client: openai.OpenAI) -> None:
    found = client.completions.create(model="it", prompt="a <|calling|>").choices[0].text
    assert found.startswith('Let me look.\n\n{"name"') and found.endswith("\n</tool_call>\n"), "without special tokens"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice: must be auto or none"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice: "),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "message 1"),
        ({"messages": [{"content": "a?"}]}, "message 1"),
        ({"messages": [{"role": "user"}]}, "message 1"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "messages: "),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_line(client: openai.OpenAI, options: Any, reason: str) -> None:
    with pytest.raises(openai.BadRequestError, match=reason) as caught:
        ask(client, **options)
    assert caught.value.type == "invalid_request_error" and "\n" not in caught.value.message


def test_what_a_model_of_no_known_form_thought_is_printed_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = "{{ messages[0].content }}<think>{# up to </think> #}"
    model = scripted_model.save(tmp_path / "it", template, {"<think>": ["\nhm\n", "</think>", "\nyes"]})
    found = answer_format.of_model(model)
    assert found.description == "not parsed, since the chat template has none of the known forms" and found.reasoning
    serving.main(["--model", f"it={model}", "--ask=a?"])
    assert capsys.readouterr().out == "hm\n\nyes\n"
