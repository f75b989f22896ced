"""The parts of an answer, in the order in which the model wrote them."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Content:
    """A piece of the text for the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """A piece of what the model thought before it answered."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """`arguments`: a JSON object, as text."""

    name: str
    arguments: str


Part = Content | Reasoning | ToolCall


def content(parts: Iterable[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


def reasoning(parts: Iterable[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Reasoning))


def tool_calls(parts: Iterable[Part]) -> list[ToolCall]:
    return [part for part in parts if isinstance(part, ToolCall)]
