"""An answer in pieces has the same parts as the whole of it; no text of it is lost, and no markup is content."""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_ft.data.text.answer_format import AnswerFormat
from hyperpod_ft.serving.markup import parts as parts_of
from hyperpod_ft.serving.markup.parts import Content, Part, Reasoning, ToolCall
from hyperpod_ft.serving.markup.stream import MarkupStream

PROPERTIES = {"a": {"type": "integer"}, "b": {"type": "string"}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": PROPERTIES}}}
]
HERMES, THINKING = AnswerFormat("hermes"), AnswerFormat("hermes", reasoning=True)
CODER, LLAMA = AnswerFormat("qwen3_coder", reasoning=True), AnswerFormat("llama3_json")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALLED = ToolCall("f", '{"a": 1}')
XML = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


def read(form: AnswerFormat, pieces: Sequence[str], *, tools: Sequence[Any] = TOOLS, prompt: str = "") -> list[Part]:
    """The parts, with neighboring pieces of text joined."""
    stream = MarkupStream(form, tools, prompt)
    found = [part for piece in pieces for part in stream.feed(piece, last=False)] + stream.feed("", last=True)
    joined: list[Part] = []
    for kind, group in groupby(found, type):
        same = list(group)
        joined += same if kind is ToolCall else [kind("".join(part.text for part in same))]  # type: ignore[union-attr]
    return joined


@pytest.mark.parametrize(
    ("form", "text", "found"),
    [
        (HERMES, " plain ", [Content("plain")]),
        (HERMES, CALL, [CALLED]),
        (HERMES, f"\n\n{CALL}\n{CALL}\n", [CALLED, CALLED]),
        (HERMES, f"Wait.\n{CALL} Done. ", [Content("Wait."), CALLED, Content("\n Done.")]),
        (HERMES, CALL.removesuffix("</tool_call>"), [CALLED]),
        (HERMES, "<tool_call>{oops}</tool_call>", [Content("<tool_call>{oops}</tool_call>")]),
        (HERMES, f"<tool_call>oops</tool_call>{CALL}", [Content("<tool_call>oops</tool_call>"), CALLED]),
        (HERMES, '<tool_call>\n{"name": "f", "argu', [Content('<tool_call>\n{"name": "f", "argu')]),
        (HERMES, "a < b <tool", [Content("a < b <tool")]),
        (HERMES, "<think>a</think>b", [Content("<think>a</think>b")]),
        (THINKING, "<think>\nhm\n</think>\n\nYes.", [Reasoning("hm"), Content("Yes.")]),
        (THINKING, "<think>\n\n</think>\n\nYes.", [Content("Yes.")]),
        (THINKING, f"\n<think>hm</think>{CALL}", [Reasoning("hm"), CALLED]),
        (THINKING, f"<think>{CALL}</think>", [Reasoning(CALL)]),
        (THINKING, "<think>for ever </thi", [Reasoning("for ever </thi")]),
        (THINKING, "No <think>a</think>", [Content("No <think>a</think>")]),
        (CODER, f"<think>hm</think>\n\n{XML}", [Reasoning("hm"), CALLED]),
        (CODER, CALL, [Content(CALL)]),
        (LLAMA, '{"name": "f", "parameters": {"a": 1}}', [CALLED]),
        (LLAMA, '\n\n<|python_tag|>{"name": "f", "parameters": {"a": 1}}\n', [CALLED]),
        (LLAMA, '{"name": "g", "parameters": {}}', [Content('{"name": "g", "parameters": {}}')]),
        (LLAMA, "<|python_tag|>print(1)", [Content("<|python_tag|>print(1)")]),
        (LLAMA, '{"name": "f", "parameters": {}} and', [Content('{"name": "f", "parameters": {}} and')]),
        (LLAMA, 'See {"name": "f", "parameters": {}}', [Content('See {"name": "f", "parameters": {}}')]),
    ],
)
def test_the_parts_of_an_answer(form: AnswerFormat, text: str, found: list[Part]) -> None:
    assert read(form, [text]) == found
    assert read(form, list(text)) == found


def test_the_prompt_may_have_opened_the_reasoning() -> None:
    for text in ("hm\n</think>\n\nYes.", "<think>hm</think>Yes."):
        assert read(THINKING, [text], prompt="<|im_start|>assistant\n<think>\n") == [Reasoning("hm"), Content("Yes.")]
    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert read(THINKING, ["Yes.</think>"], prompt=closed) == [Content("Yes.</think>")]
    assert read(HERMES, ["Yes."], prompt="say <think>") == [Content("Yes.")]


def test_calls_are_read_only_where_there_are_tools() -> None:
    assert read(HERMES, [CALL], tools=()) == [Content(CALL)]
    assert read(THINKING, [f"<think>hm</think>{CALL}"], tools=()) == [Reasoning("hm"), Content(CALL)]
    assert read(AnswerFormat(), [f" {CALL} "]) == [Content(f" {CALL} ")], "as it stands"


def test_text_is_given_as_soon_as_it_is_known_to_be_text() -> None:
    stream = MarkupStream(THINKING, TOOLS)
    fed = ["<th", "ink>", "hm", " so", "</thi", "nk>", "a", " <", "b", "<tool", "_call>", "\n{"]
    found = [stream.feed(piece, last=False) for piece in fed]
    given_now = [Reasoning("hm"), Reasoning(" so"), Content("a"), Content(" <b")]
    assert [part for parts in found for part in parts] == given_now
    assert found[fed.index("hm")] == [Reasoning("hm")] and found[fed.index("a")] == [Content("a")]


WORDS = st.integers(0, 99).map("w{}".format)
MARKUP = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "<function=f>", "</function>"),
        *("<parameter=a>", "</parameter>", '{"name": "f", "arguments": {"b": "', '"}}', CALL, XML, " ", "\n", "<", "{"),
    ]
)
ANSWERS = st.lists(WORDS | MARKUP, max_size=14).map("".join)
FORMS = st.builds(AnswerFormat, st.sampled_from([None, "hermes", "qwen3_coder", "llama3_json"]), st.booleans())
PROMPTS = st.sampled_from(["", "<think>\n"])


@st.composite
def divided(draw: st.DrawFn) -> list[str]:
    text = draw(ANSWERS)
    cuts = sorted(draw(st.sets(st.integers(0, len(text)))))
    return [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(FORMS, divided(), PROMPTS)
def test_any_division_gives_the_same_parts(form: AnswerFormat, pieces: list[str], prompt: str) -> None:
    assert read(form, pieces, prompt=prompt) == read(form, ["".join(pieces)], prompt=prompt)


@given(FORMS, ANSWERS, PROMPTS)
def test_no_text_is_lost(form: AnswerFormat, text: str, prompt: str) -> None:
    found = read(form, [text], prompt=prompt)
    shown = "".join(part.arguments if isinstance(part, ToolCall) else part.text for part in found)
    assert re.findall(r"w\d+", shown) == re.findall(r"w\d+", text)
    if not parts_of.tool_calls(found) and not form.reasoning:
        assert shown.strip() == text.strip()


@given(st.lists(st.text(alphabet="ab <\n", max_size=6) | st.just(CALL), max_size=8))
def test_content_is_what_stands_around_the_calls(written: list[str]) -> None:
    found = read(HERMES, ["".join(written)])
    assert parts_of.tool_calls(found) == [CALLED] * written.count(CALL)
    around = "".join(piece for piece in written if piece != CALL)
    assert parts_of.content(found) == around.strip()
