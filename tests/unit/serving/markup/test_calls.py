"""Calls of tools as models write them, and what is no call."""

import json
from typing import Any

import pytest

from hyperpod_ft.serving.markup import calls
from hyperpod_ft.serving.markup.parts import ToolCall


def tool(name: str, **properties: Any) -> dict[str, Any]:
    function = {"name": name, "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": function}


WEATHER = tool("weather", city={"type": "string"}, days={"type": "integer"})


def test_json() -> None:
    call = calls.read_json('\n{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}\n')
    assert call == ToolCall("weather", '{"city": "Zürich", "days": 3}')


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '"weather"',
        '{"name": "weather"}',
        '{"arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": " ", "arguments": {}}',
        '{"name": "a\\nb", "arguments": {}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "weather", "arguments": "{}"}',
        '{"name": "weather", "arguments": {"days": NaN}}',
        '{"name": "weather", "arguments": {}} and more',
        '{"name": "weather", "arguments": ' + '{"a":' * 100_000,
        '{"name": "weather", "arguments": {"days": ' + "1" * 5000 + "}}",
    ],
)
def test_what_is_no_json_call(text: str) -> None:
    assert calls.read_json(text) is None


def test_half_a_character_stays_an_escape() -> None:
    call = calls.read_json('{"name": "weather", "arguments": {"city": "\\ud83d"}}')
    assert call is not None and call.arguments.encode() == b'{"city": "\\ud83d"}'


def test_bare_json_calls_a_tool_that_there_is() -> None:
    text = '{"name": "weather", "parameters": {"city": "Bern"}}'
    for written in (text, f" <|python_tag|>{text}\n"):
        assert calls.read_bare_json(written, [WEATHER]) == ToolCall("weather", '{"city": "Bern"}')
    assert calls.read_bare_json('{"name": "Ada", "parameters": {"age": 36}}', [WEATHER]) is None
    assert calls.read_bare_json('<|python_tag|>weather.call(city="Bern")', [WEATHER]) is None


def written(**values: str) -> str:
    inside = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"\n<function=f>\n{inside}</function>\n"


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({"type": "string"}, " two\n\nlines <b>\n", " two\n\nlines <b>\n"),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "integer"}, "3", 3),
        ({"type": "number"}, "-1.5e3", -1500.0),
        ({"type": "integer"}, "three", "three"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "array"}, '["a", 1]', ["a", 1]),
        ({"type": "object"}, '{"a": {"b": null}}', {"a": {"b": None}}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "3", "3"),
        ({"description": "anything"}, "3", "3"),
        ({"type": 3, "anyOf": "odd"}, "3", "3"),
        ("odd", "3", "3"),
    ],
)
def test_xml_values_have_the_types_of_the_schema(schema: Any, text: str, value: Any) -> None:
    call = calls.read_xml(written(a=text), [tool("f", a=schema)])
    assert call is not None and json.loads(call.arguments) == {"a": value}


def test_xml() -> None:
    both = written(city="Bern", days="3").replace("f>", "weather>", 1)
    assert calls.read_xml(both, [WEATHER]) == ToolCall("weather", '{"city": "Bern", "days": 3}')
    tight = "<function=weather><parameter=days>3</parameter></function>"
    assert calls.read_xml(tight, [WEATHER]) == ToolCall("weather", '{"days": 3}')
    assert calls.read_xml("<function=g></function>", [WEATHER]) == ToolCall("g", "{}"), "the client says what it knows"
    assert calls.read_xml(written(a="1"), [{"type": "function", "function": {"name": "f"}}]) == ToolCall(
        "f", '{"a": "1"}'
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"name": "f", "arguments": {}}',
        "<function=f>",
        "<function=></function>",
        "<function=f>text</function>",
        "<function=f><parameter=a>1</function>",
        "<function=f><parameter=a>1</parameter> text</function>",
        "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>",
        "before <function=f></function>",
    ],
)
def test_what_is_no_xml_call(text: str) -> None:
    assert calls.read_xml(text, [tool("f", a={"type": "string"})]) is None
