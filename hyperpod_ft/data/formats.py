"""Rows to text: each dataset format's prompt and completion, and which parts of the text the loss is on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hyperpod_ft.config.run_config import Dataset
from hyperpod_ft.data import chat
from hyperpod_ft.data.example import Example, RowError, Segment
from hyperpod_ft.errors import UserError

if TYPE_CHECKING:
    from hyperpod_ft.data.tokenizer import Tokenizer

# The two templates of Stanford Alpaca, with the line break after "Response:" that alpaca-lora and axolotl write.
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
_ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


def render(dataset: Dataset, row: Mapping[str, Any], tokenizer: Tokenizer | None) -> Example:
    """One row as text; only chats need the tokenizer.

    Raises RowError, or UserError when the tokenizer's or user's template is at fault.
    """
    if dataset.format == "chat":
        assert tokenizer is not None
        example = chat.render(_messages(row), tokenizer, all_trained=dataset.loss_on == "all")
    elif dataset.format == "text":
        example = _joined("", text_field(row, "text"), prompt_trained=False)
    else:
        prompt, completion = _PROMPTS[dataset.format](dataset, row), _COMPLETIONS[dataset.format](dataset, row)
        example = _joined(prompt, completion, prompt_trained=dataset.loss_on == "all")
    if not example.completion.strip():
        raise RowError("empty completion")
    for segment in example.segments:
        _check_unicode(segment.text)
    return example


def prompt_of(dataset: Dataset, row: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    """The text before an answer, exactly as `render` writes it in training; the row needs no completion.

    A `text` row is itself what is to be continued. Raises as `render` does.
    """
    if dataset.format == "chat":
        prompt = chat.prompt(_messages(row), tokenizer)
    elif dataset.format == "text":
        prompt = text_field(row, "text")
    else:
        prompt = _PROMPTS[dataset.format](dataset, row)
    _check_unicode(prompt)
    return prompt


def check_prompt(dataset: Dataset, row: Mapping[str, Any], where: str) -> None:
    """Raise UserError when `prompt_of` could not render the row; for every format but chat, which needs a tokenizer."""
    try:
        _check_unicode(text_field(row, "text") if dataset.format == "text" else _PROMPTS[dataset.format](dataset, row))
    except RowError as error:
        raise UserError(
            f"{where}: {error}", f"write it as a row of format {dataset.format}, or as plain text"
        ) from error


def _joined(prompt: str, completion: str, *, prompt_trained: bool) -> Example:
    before = (Segment(prompt, prompt_trained),) if prompt else ()
    return Example(prompt, completion, (*before, Segment(completion, True)))


def text_field(row: Mapping[str, Any], name: str) -> str:
    """A field that has to be text. Raises RowError."""
    if name not in row:
        raise RowError(f"missing field {name!r}", f"it has {', '.join(map(str, row)) or 'none'}")
    value = row[name]
    if not isinstance(value, str):
        raise RowError(f"field {name!r} is no text", f"it is {type(value).__name__}")
    return value


def _filled_field(row: Mapping[str, Any], name: str) -> str:
    value = text_field(row, name)
    if not value.strip():
        raise RowError(f"field {name!r} is empty")
    return value


def _optional_field(row: Mapping[str, Any], name: str) -> str:
    # Published sets write "no context" as an empty text, as null, or leave it out.
    value = "" if row.get(name) is None else text_field(row, name)
    return value if value.strip() else ""


def _messages(row: Mapping[str, Any]) -> Sequence[Any]:
    if "messages" not in row:
        raise RowError("missing field 'messages'", f"it has {', '.join(map(str, row)) or 'none'}")
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise RowError("field 'messages' is no list of messages")
    return messages


def _dolly_prompt(_: Dataset, row: Mapping[str, Any]) -> str:
    context = _optional_field(row, "context")
    between = f"### Context\n{context}\n\n" if context else ""
    return f"### Instruction\n{_filled_field(row, 'instruction')}\n\n{between}### Answer\n"


def _alpaca_prompt(_: Dataset, row: Mapping[str, Any]) -> str:
    instruction, given = _filled_field(row, "instruction"), _optional_field(row, "input")
    return (_ALPACA_INPUT if given else _ALPACA).format(instruction=instruction, input=given)


_PROMPTS: dict[str, Callable[[Dataset, Mapping[str, Any]], str]] = {
    "dolly": _dolly_prompt,
    "alpaca": _alpaca_prompt,
    "prompt-completion": lambda _, row: text_field(row, "prompt"),
    "template": lambda dataset, row: _fill("prompt_template", dataset.prompt_template or "", row),
}
_COMPLETIONS: dict[str, Callable[[Dataset, Mapping[str, Any]], str]] = {
    "dolly": lambda _, row: text_field(row, "response"),
    "alpaca": lambda _, row: text_field(row, "output"),
    "prompt-completion": lambda _, row: text_field(row, "completion"),
    "template": lambda dataset, row: _fill("completion_template", dataset.completion_template or "", row),
}


def _fill(key: str, source: str, row: Mapping[str, Any]) -> str:
    from hyperpod_ft.data import template  # noqa: PLC0415 - Jinja, which the other formats do without

    return template.fill(key, source, row)


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError("invalid UTF-8", f"character {error.start + 1} of the text") from error
