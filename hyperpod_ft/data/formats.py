"""Rows to text: each dataset format's prompt and completion, and which parts of the text count in the loss."""

from collections.abc import Mapping, Sequence
from typing import Any

from hyperpod_ft.config.run_config import Dataset
from hyperpod_ft.data import chat, preferences, prompts
from hyperpod_ft.data.example import Example, RowError
from hyperpod_ft.data.tokenizer import Tokenizer


def documents(dataset: Dataset, row: Mapping[str, Any], tokenizer: Tokenizer | None) -> tuple[Example, ...]:
    """The documents that one row becomes: itself, or of a preference the chosen one, then the rejected one.

    Raises what `render` raises.
    """
    if dataset.format != "preference":
        return (render(dataset, row, tokenizer),)
    assert tokenizer is not None
    pair = preferences.render(row, tokenizer)
    return tuple(_checked(example) for example in pair)


def render(dataset: Dataset, row: Mapping[str, Any], tokenizer: Tokenizer | None) -> Example:
    """One row as text; only chats need the tokenizer.

    Raises RowError, or UserError when the tokenizer's or the user's template is wrong.
    """
    if dataset.format == "chat":
        assert tokenizer is not None
        example = chat.render(_messages(row, "messages"), tokenizer, all_trained=dataset.loss_on == "all")
    elif dataset.format == "text":
        example = prompts.joined("", prompts.prompt(dataset, row))
    else:
        prompt, completion = prompts.prompt(dataset, row), prompts.completion(dataset, row)
        example = prompts.joined(prompt, completion, prompt_trained=dataset.loss_on == "all")
    return _checked(example)


def _checked(example: Example) -> Example:
    if not example.completion.strip():
        raise RowError("empty completion")
    for segment in example.segments:
        prompts.check_unicode(segment.text)
    return example


def prompt_of(dataset: Dataset, row: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    """The text before an answer, exactly as `render` writes it in training; the row needs no completion.

    Raises what `render` raises.
    """
    if not prompts.is_chat(dataset, row):
        return prompts.prompt(dataset, row)
    text = chat.prompt(_messages(row, "messages" if dataset.format == "chat" else "prompt"), tokenizer)
    prompts.check_unicode(text)
    return text


def _messages(row: Mapping[str, Any], name: str) -> Sequence[Any]:
    messages = prompts.field(row, name)
    if not isinstance(messages, list) or not messages:
        raise RowError(f"field {name!r} is not a list of messages")
    return messages
