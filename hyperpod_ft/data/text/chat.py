"""Messages to text through the tokenizer's chat template, with the assistant's turns marked."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from hyperpod_ft.data.text.example import Example, RowError, Segment
from hyperpod_ft.data.tokenizer import Tokenizer
from hyperpod_ft.errors import UserError

_MARKS_TURNS = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers decides it


def render(
    messages: Sequence[Any], tokenizer: Tokenizer, *, all_trained: bool = False, last_answers: int | None = None
) -> Example:
    """A conversation that ends with the assistant, whose answers are trained: all of them, or the last few.

    Raises RowError, or UserError for an unsuitable template.
    """
    _check(messages)
    if messages[-1]["role"] != "assistant":
        raise RowError("last message is not from the assistant", f"its role is {messages[-1]['role']!r}")
    template = _template(tokenizer)
    if _MARKS_TURNS.search(template):
        text, spans = _apply(messages, tokenizer, template, return_assistant_tokens_mask=True)
    else:
        text, spans = _prefix_spans(messages, tokenizer, template)
    if not spans or not text[slice(*spans[-1])].strip():
        raise RowError("chat template omits the last answer")
    if last_answers is not None:
        spans = spans[-last_answers:]
    segments = tuple(Segment(piece, trained or all_trained) for piece, trained in _cut(text, spans))
    return Example(text[: spans[-1][0]], messages[-1]["content"], segments, templated=True)


def prompt(
    messages: Sequence[Any],
    tokenizer: Tokenizer,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The text that the assistant's answer follows; an answer at the end of the conversation is left out."""
    messages = _normal(messages)
    _check(messages)
    before = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    if reserved := sorted({"messages", "tools", "add_generation_prompt"}.intersection(template_kwargs or ())):
        raise RowError("chat_template_kwargs with a name of the kit's own", reserved[0])
    options = {"tools": list(tools) if tools else None, **(template_kwargs or {})}
    return _apply(before, tokenizer, _template(tokenizer), add_generation_prompt=True, **options)[0]


def _normal(messages: Sequence[Any]) -> list[Any]:
    # a stand-in for the rewritten rendering of conversations
    found = []
    for number, message in enumerate(messages, 1):
        made = dict(message)
        if isinstance(content := made.get("content"), list):
            if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
                raise RowError("part of a message that is not text", f"message {number}")
            made["content"] = "".join(part["text"] for part in content)
        if calls := made.get("tool_calls"):
            made["content"] = made.get("content") or ""
            made["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": _object(call["function"]["arguments"])}}
                for call in calls
            ]
        found.append(made)
    return found


def _object(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _check(messages: Sequence[Any]) -> None:
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError("message without a role", f"message {number}")
        if not isinstance(message.get("content"), str):
            raise RowError("message whose content is not a string", f"message {number}")
        if message["role"] == "assistant" and not message["content"].strip() and not message.get("tool_calls"):
            raise RowError("empty completion", f"message {number}")


def _template(tokenizer: Tokenizer) -> str:
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise UserError(
            "dataset.format: the rows are chat messages, and the model's tokenizer has no chat template",
            "use an instruction-tuned model's tokenizer, or format template",
        ) from error


def _apply(
    messages: Sequence[Any], tokenizer: Tokenizer, template: str, **options: Any
) -> tuple[str, list[tuple[int, int]]]:
    # transformers' renderer: it has the Jinja environment and finds the spans that {% generation %} marks
    from jinja2 import TemplateError  # noqa: PLC0415 - only chats need these two
    from transformers.utils import chat_template_utils  # noqa: PLC0415

    renderer: Any = chat_template_utils.render_jinja_template  # annotated `-> str`, returns two lists
    try:
        texts, spans = renderer(
            [list(messages)], chat_template=template, **options, **dict(tokenizer.special_tokens_map)
        )
    except TemplateError as error:  # a template's own raise_exception("roles must alternate")
        raise RowError("chat template rejects the messages", str(error)) from error
    except Exception as error:  # the template's expressions may raise anything
        raise RowError("chat template fails", f"{type(error).__name__}: {error}") from error
    return str(texts[0]), spans[0] if spans else []


def _prefix_spans(messages: Sequence[Any], tokenizer: Tokenizer, template: str) -> tuple[str, list[tuple[int, int]]]:
    # A turn is the text that one more message adds after the generation prompt.
    text, _ = _apply(messages, tokenizer, template)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, _ = _apply(messages[:index], tokenizer, template, add_generation_prompt=True)
        after, _ = _apply(messages[: index + 1], tokenizer, template)
        if not (text.startswith(after) and after.startswith(before)):
            raise UserError(
                "dataset.format: the chat template rewrites earlier text when a message is added,"
                " so that the assistant's turns cannot be found",
                "mark them in the template with {% generation %}",
            )
        spans.append((len(before), len(after)))
    return text, spans


def _cut(text: str, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[str, bool]]:
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    for number, (start, stop) in enumerate(pairwise(edges)):
        if start < stop:
            yield text[start:stop], number % 2 == 1
