"""The prompts of a run file's section `generate`, as the models are asked them."""

from collections.abc import Iterable, Sequence
from typing import Any

from hyperpod_ft.config.sections.inputs import TEXT_OR_MESSAGES, Dataset
from hyperpod_ft.data.prepared import Sample
from hyperpod_ft.data.text import formats
from hyperpod_ft.data.text.prompts import is_chat
from hyperpod_ft.data.tokenizer import Tokenizer
from hyperpod_ft.errors import UserError


def as_asked(
    prompts: Sequence[str | dict[str, Any]], dataset: Dataset, tokenizer: Tokenizer, *, chats: bool
) -> list[tuple[str, bool]]:
    """The text of each prompt, and whether a chat template wrote it. `chats`: so are the raw rows.

    Raises UserError for one that is not like a row of the dataset, or that the template refuses.
    """
    found = []
    for number, given in enumerate(prompts):
        row = as_chat(dataset, given) if chats else given
        if isinstance(row, str):
            found.append((row, False))
            continue
        try:
            found.append((formats.prompt_of(dataset, row, tokenizer), is_chat(dataset, row)))
        except UserError as error:
            raise UserError(f"generate.prompts.{number}: {error}", "write it as a row of the dataset") from error
    return found


def are_chats(dataset: Dataset, samples: Iterable[Sample]) -> bool:
    """Whether the raw rows are chats, which those of preferences may be; `samples`: of the prepared dataset."""
    return dataset.format == "chat" or (dataset.format in TEXT_OR_MESSAGES and any(one.templated for one in samples))


def as_chat(dataset: Dataset, prompt: str | dict[str, Any]) -> dict[str, Any]:
    """A prompt for raw rows that are chats: a string is the user's message."""
    key = "messages" if dataset.format == "chat" else "prompt"
    row = {key: prompt} if isinstance(prompt, str) else prompt
    if isinstance(row.get(key), str):
        return row | {key: [{"role": "user", "content": row[key]}]}
    return row
