"""What the assistant thinks before it answers, under a message's own key or within its content."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hyperpod_ft.data.text.conversation import REASONING, Conversation

KEY = REASONING[0]
_INLINE = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


def reasoning_of(message: Mapping[str, Any]) -> str:
    """What a message of the assistant has as its reasoning, under its own key or within its content."""
    inline = _INLINE.match(message["content"])
    return str(message.get(KEY) or (inline[1] if inline else "")).strip()


def answer_of(message: Mapping[str, Any]) -> str:
    """A message's content without reasoning."""
    return str(message_without(message)["content"]).strip()


def without_reasoning(given: Conversation) -> Conversation:
    """The conversation whose answers have no reasoning."""
    return replace(given, messages=tuple(map(message_without, given.messages)))


def message_without(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message["role"] != "assistant":
        return message
    kept = {key: value for key, value in message.items() if key != KEY}
    return kept | {
        "content": _INLINE.sub("", kept["content"], count=1) if _INLINE.match(kept["content"]) else kept["content"]
    }
