"""The prompts of a run file's section `generate`, as the models are asked them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hyperpod_ft.config.sections.inputs import TEXT_OR_MESSAGES, Dataset
from hyperpod_ft.data.prepared import Sample
from hyperpod_ft.data.text import formats
from hyperpod_ft.data.text.formats import RowImages
from hyperpod_ft.data.text.prompts import is_chat
from hyperpod_ft.data.tokenizer import Tokenizer
from hyperpod_ft.errors import UserError

# Images whose files are not read: their prompts are what the chat template writes.
AS_WRITTEN = RowImages(read=lambda _: b"", expanded=lambda text, _: text)


@dataclass(frozen=True)
class AskedPrompt:
    """`templated`: a chat template wrote the text, with all special tokens; `images`: the files of those in it."""

    text: str
    templated: bool = False
    images: Sequence[bytes] = ()
    image_names: Sequence[str] = ()


def as_asked(
    prompts: Sequence[str | dict[str, Any]],
    dataset: Dataset,
    tokenizer: Tokenizer,
    *,
    chats: bool,
    images: RowImages = AS_WRITTEN,
) -> list[AskedPrompt]:
    """The prompts of a run file; `chats`: the raw rows are, `images`: where rows have some, those of the prompts.

    Raises UserError for one that is not like a row of the dataset, or that the template or `images` refuse.
    """
    found = []
    for number, given in enumerate(prompts):
        row = as_chat(dataset, given) if chats else given
        if isinstance(row, str):
            found.append(AskedPrompt(row))
            continue
        try:
            if is_chat(dataset, row):
                text, asked = formats.question_of(dataset, row, tokenizer, images if dataset.images else None)
                found.append(AskedPrompt(text, True, asked.images, asked.image_names))
            else:
                found.append(AskedPrompt(formats.prompt_of(dataset, row, tokenizer)))
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
