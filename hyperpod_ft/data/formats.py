"""Rows to text: each dataset format's prompt and completion, and which parts of the text count in the loss."""

from collections.abc import Mapping, Sequence
from typing import Any

from hyperpod_ft.config.run_config import Dataset
from hyperpod_ft.data import chat, prompts
from hyperpod_ft.data.example import Example, RowError, Segment
from hyperpod_ft.data.tokenizer import Tokenizer


def render(dataset: Dataset, row: Mapping[str, Any], tokenizer: Tokenizer | None) -> Example:
    """One row as text; only chats need the tokenizer.

    Raises RowError, or UserError when the tokenizer's or the user's template is wrong.
    """
    if dataset.format == "chat":
        assert tokenizer is not None
        example = chat.render(_messages(row), tokenizer, all_trained=dataset.loss_on == "all")
    elif dataset.format == "text":
        example = _joined("", prompts.prompt(dataset, row), prompt_trained=False)
    else:
        prompt, completion = prompts.prompt(dataset, row), prompts.completion(dataset, row)
        example = _joined(prompt, completion, prompt_trained=dataset.loss_on == "all")
    if not example.completion.strip():
        raise RowError("empty completion")
    for segment in example.segments:
        prompts.check_unicode(segment.text)
    return example


def prompt_of(dataset: Dataset, row: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    """The text before an answer, exactly as `render` writes it in training; the row needs no completion.

    Raises what `render` raises.
    """
    if dataset.format != "chat":
        return prompts.prompt(dataset, row)
    text = chat.prompt(_messages(row), tokenizer)
    prompts.check_unicode(text)
    return text


def _joined(prompt: str, completion: str, *, prompt_trained: bool) -> Example:
    before = (Segment(prompt, prompt_trained),) if prompt else ()
    return Example(prompt, completion, (*before, Segment(completion, True)))


def _messages(row: Mapping[str, Any]) -> Sequence[Any]:
    messages = prompts.field(row, "messages")
    if not isinstance(messages, list) or not messages:
        raise RowError("field 'messages' is not a list of messages")
    return messages
