"""Kinds of conversations, and what becomes of them in TRL's chat templates: a table of benchmarks/performance.md.

python -m benchmarks.conversations

The templates are read from the installed package `trl`, which has them as their models publish them, and for some a
copy changed for training, which is left out here.
"""

import importlib.util
import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.command import ROOT
from hyperpod_ft.data.text import conversation
from hyperpod_ft.data.text.conversation import Conversation
from hyperpod_ft.data.text.example import RowError
from hyperpod_ft.data.text.rendering import ChatRenderer
from hyperpod_ft.data.text.turns import examples_of, turns

DOCUMENT = ROOT / "benchmarks" / "performance.md"
BEGIN, END = "<!-- made by `python -m benchmarks.conversations` -->", "<!-- end -->"
Message = dict[str, Any]
TOOL_PARAMETERS = {
    "type": "object",
    "properties": {"place": {"type": "string", "description": "A city."}, "days": {"type": "integer"}},
    "required": ["place"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "The weather.", "parameters": TOOL_PARAMETERS},
    }
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def user(text: Any) -> Message:
    return {"role": "user", "content": text}


def answer(text: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def call(arguments: Any) -> list[Message]:
    function = {"name": "get_weather", "arguments": arguments}
    return [{"id": "abcdef123", "type": "function", "function": function}]


FOUND = {"role": "tool", "content": '{"temperature": 3}', "tool_call_id": "abcdef123", "name": "get_weather"}
PLACE = {"place": "Bern", "days": 2}
CALL = answer("", tool_calls=call(PLACE))
KINDS: dict[str, tuple[list[Message], list[Any] | None, Message]] = {
    "one turn": ([user("Q1"), answer("ANS1")], None, {}),
    "system": ([{"role": "system", "content": "RULE"}, user("Q1"), answer("ANS1")], None, {}),
    "developer": ([{"role": "developer", "content": "RULE"}, user("Q1"), answer("ANS1")], None, {}),
    "two turns": ([user("Q1"), answer("ANS1"), user("Q2"), answer("ANS2")], None, {}),
    "reasoning": (
        [
            user("Q1"),
            answer("ANS1", reasoning_content="WHY1"),
            user("Q2"),
            answer("ANS2", reasoning_content="WHY2"),
        ],
        None,
        {},
    ),
    "reasoning in the content": (
        [
            user("Q1"),
            answer("<think>\nWHY1\n</think>\n\nANS1"),
            user("Q2"),
            answer("<think>\nWHY2\n</think>\n\nANS2"),
        ],
        None,
        {},
    ),
    "reasoning off": (
        [user("Q1"), answer("ANS1"), user("Q2"), answer("ANS2")],
        None,
        {"enable_thinking": False, "reasoning_effort": "low"},
    ),
    "tool call": ([user("Q1"), CALL, FOUND, answer("ANS2")], TOOLS, {}),
    "arguments as text, no content": (
        [user("Q1"), answer(None, tool_calls=call(json.dumps(PLACE))), FOUND, answer("ANS2")],
        json.dumps(TOOLS),  # type: ignore[dict-item]
        {},
    ),
    "tool call after reasoning": (
        [user("Q1"), {**CALL, "thinking": "WHY1"}, FOUND, answer("ANS2", thinking="WHY2")],
        TOOLS,
        {},
    ),
    "parts": ([user([{"type": "text", "text": "Q1"}]), answer([{"type": "text", "text": "ANS1"}])], None, {}),
}


def templates() -> dict[str, str]:
    """Those of the installed TRL by name; its own copies for training end with `_training`."""
    spec = importlib.util.find_spec("trl")
    assert spec and spec.submodule_search_locations
    files = sorted(Path(spec.submodule_search_locations[0], "chat_templates").glob("*.jinja"))
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


def given(kind: str) -> Conversation:
    messages, tools, settings = KINDS[kind]
    return conversation.of_messages(messages, tools=tools, template_kwargs=settings)


def outcome(renderer: ChatRenderer, kind: str) -> str:
    """What becomes of the conversation: the heading of its column in the table."""
    try:
        found = turns(given(kind), renderer)
    except RowError as error:
        return "refuses" if error.reason == "chat template rejects the messages" else "leaves out"
    return "one example" if len(examples_of(found)) == 1 else "unrolled"


def table() -> Iterator[str]:
    published = {name: text for name, text in templates().items() if not name.endswith("_training")}
    renderers = [ChatRenderer(text, SPECIAL) for text in published.values()]
    columns = ("one example", "unrolled", "refuses", "leaves out")
    yield f"{len(renderers)} chat templates, as TRL {metadata.version('trl')} ships them:"
    yield ""
    yield "| conversation | one example | unrolled | the template refuses it | the template leaves it out |"
    yield "|---|---|---|---|---|"
    for kind in KINDS:
        found = [outcome(renderer, kind) for renderer in renderers]
        yield f"| {kind} | {' | '.join(str(found.count(column)) for column in columns)} |"


def document(text: str) -> str:
    """A document with the text between its markers replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = "\n".join(table())
    return f"{before}{BEGIN}\n\n{lines}\n\n{END}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
