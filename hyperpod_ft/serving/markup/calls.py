"""One call of a tool, from the text that a model wrote: None for what is no call.

The tools are OpenAI's: `{"type": "function", "function": {"name": ..., "parameters": a JSON schema}}`. Schemas are the
client's; whatever they hold, reading a call does not fail.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from hyperpod_ft.data.text.answer_format import PYTHON_TAG
from hyperpod_ft.serving.markup.parts import ToolCall

Tools = Sequence[Mapping[str, Any]]

_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
# Templates write earlier arguments with Python's `str`, so that models learn its words.
_PYTHONS = {"True": "true", "False": "false", "None": "null"}


def read_json(text: str) -> ToolCall | None:
    """A call as Hermes and Qwen 3 write it between their marks: `{"name": ..., "arguments": {...}}`."""
    try:
        call = _loads(text)
    except ValueError:
        return None
    if not isinstance(call, dict):
        return None
    return _call(call.get("name"), call.get("arguments", call.get("parameters")))


def read_bare_json(text: str, tools: Tools) -> ToolCall | None:
    """A call as Llama 3 writes it: a whole answer, `{"name": ..., "parameters": {...}}`, perhaps after a tag.

    Only a tool that there is can be called: nothing else tells a call from an answer that is JSON.
    """
    call = read_json(text.strip().removeprefix(PYTHON_TAG))
    return call if call and call.name in _functions(tools) else None


def read_xml(text: str, tools: Tools) -> ToolCall | None:
    """A call as Qwen3-Coder writes it between its marks: `<function=NAME><parameter=KEY>value</parameter></function>`.

    A value is text, or JSON where the tool's schema allows no text; if it is not the JSON it should be, it is text.
    """
    if not (function := _FUNCTION.fullmatch(text)):
        return None
    name, inside = function[1].strip(), function[2]
    schemas = _properties(_functions(tools).get(name))
    arguments: dict[str, Any] = {}
    place = 0
    while place < len(inside) and (parameter := _PARAMETER.match(inside, place)):
        key = parameter[1].strip()
        if key in arguments:
            return None  # one of the two would be lost
        arguments[key] = _value(parameter[2], _types(schemas.get(key)))
        place = parameter.end()
    return None if inside[place:].strip() else _call(name, arguments)


def _call(name: Any, arguments: Any) -> ToolCall | None:
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:  # 1e999 is read as infinity
        return None
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a character, from an escape such as \ud83d
        text = json.dumps(arguments)
    return ToolCall(name, text)


def _loads(text: str) -> Any:
    """Raises ValueError for anything but JSON; Python's own reader takes NaN, which clients refuse."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _functions(tools: Tools) -> dict[str, Any]:
    """Schemas of the parameters by the name of the function."""
    return {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}


def _properties(schema: Any) -> Mapping[str, Any]:
    found = schema.get("properties") if isinstance(schema, dict) else None
    return found if isinstance(found, dict) else {}


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, dict):
        return set()
    stated = schema.get("type")
    found = {one for one in (stated if isinstance(stated, list) else [stated]) if isinstance(one, str)}
    for name in ("anyOf", "oneOf"):
        for one in schema.get(name) or () if isinstance(schema.get(name), list) else ():
            found |= _types(one)
    return found


def _value(text: str, types: set[str]) -> Any:
    word = _PYTHONS.get(text.strip(), text)
    if not types or ("string" in types and not (word == "null" and "null" in types)):
        return text
    try:
        return _loads(word)
    except ValueError:
        return text
