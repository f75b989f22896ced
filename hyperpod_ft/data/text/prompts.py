"""The prompt and completion of a raw row that is not a chat: the user's fields in fixed text or a template."""

from collections.abc import Callable, Mapping
from typing import Any

from hyperpod_ft.config.sections.inputs import TEXT_OR_MESSAGES, Dataset
from hyperpod_ft.data.images import files
from hyperpod_ft.data.text import conversation
from hyperpod_ft.data.text.example import Example, RowError, Segment
from hyperpod_ft.errors import UserError

DOLLY = "### Instruction\n{instruction}\n\n### Answer\n"
DOLLY_CONTEXT = "### Instruction\n{instruction}\n\n### Context\n{context}\n\n### Answer\n"
# The two templates of Stanford Alpaca, with the line break after "Response:" that alpaca-lora and axolotl write.
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_BEGINNING = 200  # characters of a text that are a prompt, at most


def prompt(dataset: Dataset, row: Mapping[str, Any]) -> str:
    """The text before the answer; a `text` row is itself what a model continues. Raises RowError or UserError."""
    text = text_field(row, "text") if dataset.format == "text" else _PROMPTS[dataset.format](dataset, row)
    check_unicode(text)
    return text


def completion(dataset: Dataset, row: Mapping[str, Any]) -> str:
    """The answer; not for format `text`. Raises RowError or UserError."""
    return _COMPLETIONS[dataset.format](dataset, row)


def is_chat(dataset: Dataset, row: Mapping[str, Any]) -> bool:
    """Whether the tokenizer's chat template writes the row's prompt."""
    if dataset.format == "prompt" and dataset.prompt_template is not None:
        return False
    return dataset.format == "chat" or (dataset.format in TEXT_OR_MESSAGES and isinstance(row.get("prompt"), list))


def check_prompt(dataset: Dataset, row: Mapping[str, Any], where: str) -> None:
    """Raises UserError when `prompt` does, or is blank; of a chat, when it has no messages that can be read."""
    try:
        if is_chat(dataset, row):
            chat = row if dataset.format == "chat" else {"messages": row.get("prompt")}
            if isinstance(said := chat.get("messages"), str):  # it is the user's message
                chat = {**chat, "messages": [{"role": "user", "content": said}]}
            conversation.of_row(chat, files.of_submission if dataset.images else None)
        elif not prompt(dataset, row).strip():
            raise RowError("empty prompt", "there is nothing to answer")
    except RowError as error:
        raise UserError(
            f"{where}: {error}", f"write it as a row of format {dataset.format}, or as plain text"
        ) from error


def joined(prompt: str, completion: str, *, prompt_trained: bool = False) -> Example:
    """Prompt and completion as one document."""
    before = (Segment(prompt, prompt_trained),) if prompt else ()
    return Example(prompt, completion, (*before, Segment(completion, True)))


def document(text: str) -> Example:
    """A text that is trained as a whole; for a reader, its beginning is the prompt and the rest the completion."""
    half = min(len(text.rstrip()) // 2, _BEGINNING)
    # before a space, so that the continuation begins with a token of its own
    spaces = [place for place in range(half, 0, -1) if text[place].isspace() and text[:place].strip()]
    cut = spaces[0] if spaces else half
    return Example(text[:cut], text[cut:], (Segment(text, True),))


def text_field(row: Mapping[str, Any], name: str) -> str:
    """A field that must be a string. Raises RowError."""
    value = field(row, name)
    if not isinstance(value, str):
        raise RowError(f"field {name!r} is not a string", f"it is {type(value).__name__}")
    return value


def field(row: Mapping[str, Any], name: str) -> Any:
    """Raises RowError when it is missing."""
    if name not in row:
        raise RowError(f"missing field {name!r}", f"the row has {', '.join(map(str, row)) or 'no fields'}")
    return row[name]


def _filled_field(row: Mapping[str, Any], name: str) -> str:
    value = text_field(row, name)
    if not value.strip():
        raise RowError(f"field {name!r} is empty")
    return value


def _optional_field(row: Mapping[str, Any], name: str) -> str:
    # Published sets write "no context" as an empty text, as null, or leave it out.
    value = "" if row.get(name) is None else text_field(row, name)
    return value if value.strip() else ""


def check_unicode(text: str) -> None:
    """Raises RowError for lone surrogates, which UTF-8 cannot encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError("invalid UTF-8", f"character {error.start + 1} of the text") from error


def _filled_prompt(dataset: Dataset, row: Mapping[str, Any]) -> str:
    return _fill("prompt_template", dataset.prompt_template or "", row)


def _dolly_prompt(_: Dataset, row: Mapping[str, Any]) -> str:
    instruction, context = _filled_field(row, "instruction"), _optional_field(row, "context")
    return (DOLLY_CONTEXT if context else DOLLY).format(instruction=instruction, context=context)


def _alpaca_prompt(_: Dataset, row: Mapping[str, Any]) -> str:
    instruction, given = _filled_field(row, "instruction"), _optional_field(row, "input")
    return (ALPACA_INPUT if given else ALPACA).format(instruction=instruction, input=given)


_PROMPTS: dict[str, Callable[[Dataset, Mapping[str, Any]], str]] = {
    "dolly": _dolly_prompt,
    "alpaca": _alpaca_prompt,
    "prompt-completion": lambda _, row: text_field(row, "prompt"),
    "preference": lambda _, row: text_field(row, "prompt"),
    "unpaired-preference": lambda _, row: text_field(row, "prompt"),
    "prompt": lambda dataset, row: (
        text_field(row, "prompt") if dataset.prompt_template is None else _filled_prompt(dataset, row)
    ),
    "template": _filled_prompt,
}
_COMPLETIONS: dict[str, Callable[[Dataset, Mapping[str, Any]], str]] = {
    "dolly": lambda _, row: text_field(row, "response"),
    "alpaca": lambda _, row: text_field(row, "output"),
    "prompt-completion": lambda _, row: text_field(row, "completion"),
    "template": lambda dataset, row: _fill("completion_template", dataset.completion_template or "", row),
}


def _fill(key: str, source: str, row: Mapping[str, Any]) -> str:
    from hyperpod_ft.data.text import template  # noqa: PLC0415 - imports Jinja, which the other formats do not need

    return template.fill(key, source, row)
