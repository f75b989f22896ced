"""Raw rows to text: each dataset format's prompt and completion, and which parts of the text count in the loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.data.text import chat, prompts
from hyperpod_ft.data.text import conversation as conversations
from hyperpod_ft.data.text.conversation import Conversation, ReadImage
from hyperpod_ft.data.text.example import Example, RowError, Segment
from hyperpod_ft.data.text.reasoning import without_reasoning
from hyperpod_ft.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class RowImages:
    """The images that rows name, and what they are to a model.

    `expanded`: a text with the tokens of its images. Raises RowError.
    """

    read: ReadImage
    expanded: Callable[[str, Sequence[bytes]], str]


def examples(
    dataset: Dataset, row: Mapping[str, Any], tokenizer: Tokenizer | None, images: RowImages | None = None
) -> list[tuple[Example, ...]]:
    """The examples that a raw row becomes, each of `dataset.documents_per_example` documents.

    A preference is its chosen document, then the rejected one. A conversation may be several examples; any other row is
    one. Only chats need the tokenizer, and those with `dataset.images` their `images`: each of their answers is an
    example. Raises RowError, or UserError when the tokenizer's or the user's template is wrong.
    """
    if dataset.format == "preference":
        assert tokenizer is not None
        return [tuple(map(_checked, _pair(dataset, row, tokenizer)))]
    if dataset.format == "unpaired-preference":
        assert tokenizer is not None
        return [(_checked(_unpaired(dataset, row, tokenizer)),)]
    if dataset.format == "prompt":
        assert tokenizer is not None
        return [(_alone(dataset, row, tokenizer),)]
    if dataset.format == "chat":
        assert tokenizer is not None
        found = chat.examples(
            conversation_of(dataset, row, images),
            tokenizer,
            train_on=dataset.train_on,
            reasoning_trained=dataset.reasoning == "train",
            all_trained=dataset.loss_on == "all",
        )
        if images is not None:
            found = [_with_images(turn, images) for example in found for turn in chat.alone(example)]
        return [(_checked(example),) for example in found]
    return [(_checked(_plain(dataset, row)),)]


def _with_images(turn: Example, images: RowImages) -> Example:
    """An answer whose context has the tokens of images; its prompt stays as the chat template wrote it."""
    context, answer = turn.segments
    images.expanded(answer.text, ())  # a token of images in it would be one too many
    return replace(turn, segments=(replace(context, text=images.expanded(turn.prompt, turn.images)), answer))


def conversation_of(dataset: Dataset, row: Mapping[str, Any], images: RowImages | None = None) -> Conversation:
    """A row of messages as it is trained: with the run's `chat_template_kwargs`, and `reasoning` dropped if it is.

    Raises RowError.
    """
    kept = {name: row[name] for name in row if name not in dataset.ignored_columns}
    found = conversations.of_row(kept, images.read if images else None)
    found = replace(found, template_kwargs={**dataset.chat_template_kwargs, **found.template_kwargs})
    return without_reasoning(found) if dataset.reasoning == "drop" else found


def _around(row: Mapping[str, Any], messages: Sequence[Any]) -> dict[str, Any]:
    """Messages of a preference as a row, with what belongs to them."""
    return {name: row[name] for name in conversations.BESIDE_MESSAGES if name in row} | {"messages": list(messages)}


def _plain(dataset: Dataset, row: Mapping[str, Any]) -> Example:
    if dataset.format == "text":
        return prompts.document(prompts.prompt(dataset, row))
    prompt, completion = prompts.prompt(dataset, row), prompts.completion(dataset, row)
    if dataset.max_target_length is not None and not prompt.strip():
        raise RowError("empty prompt", "an encoder-decoder needs a source")
    return prompts.joined(prompt, completion, prompt_trained=dataset.loss_on == "all")


def _alone(dataset: Dataset, row: Mapping[str, Any], tokenizer: Tokenizer) -> Example:
    """A prompt without an answer."""
    text = prompt_of(dataset, row, tokenizer)
    if not text.strip():
        raise RowError("empty prompt", "there is nothing to answer")
    return Example(text, "", (Segment(text, trained=False),), templated=prompts.is_chat(dataset, row))


def _checked(example: Example) -> Example:
    if not example.completion.strip():
        raise RowError("empty completion")
    for segment in example.segments:
        prompts.check_unicode(segment.text)
    return example


def prompt_of(dataset: Dataset, row: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    """The text before an answer, exactly as in training; the row needs no completion. Raises what `examples` raises."""
    if not prompts.is_chat(dataset, row):
        return prompts.prompt(dataset, row)
    return question_of(dataset, row, tokenizer)[0]


def question_of(
    dataset: Dataset, row: Mapping[str, Any], tokenizer: Tokenizer, images: RowImages | None = None
) -> tuple[str, Conversation]:
    """Likewise of a chat, with the conversation whose images the text has."""
    given = conversation_of(dataset, row if dataset.format == "chat" else _around(row, row["prompt"]), images)
    text = chat.asked(given, tokenizer)
    prompts.check_unicode(text)
    if images is not None:
        images.expanded(text, given.images)
    return text, given


def _pair(dataset: Dataset, row: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[Example, Example]:
    """The chosen and the rejected document of a preference, both with the prompt; only completions are trained.

    Completions that are strings continue a prompt that is one, or answer one of messages. Completions of messages
    follow a prompt of messages or the user's text; without `prompt`, and where they begin with the user's message
    themselves, as in UltraFeedback, what both have in common is the prompt.

    Raises RowError, or UserError for an unsuitable chat template.
    """
    prompt, completions = row.get("prompt"), [prompts.field(row, name) for name in ("chosen", "rejected")]
    if completions[0] == completions[1]:
        raise RowError("chosen and rejected are the same")
    if all(isinstance(completion, str) for completion in completions):
        if isinstance(prompt, list):
            return _conversations(dataset, row, [[*prompt, _answer(each)] for each in completions], tokenizer)
        before = prompts.text_field(row, "prompt")
        one, other = (prompts.joined(before, completion) for completion in completions)
        return one, other
    if not all(isinstance(completion, list) and completion for completion in completions):
        raise RowError("fields 'chosen' and 'rejected' are neither two strings nor two lists of messages")
    pair = [_with_prompt(prompt, completion) for completion in completions]
    return _conversations(dataset, row, pair, tokenizer)


def _unpaired(dataset: Dataset, row: Mapping[str, Any], tokenizer: Tokenizer) -> Example:
    """The document of a prompt and one completion, which alone is trained, with its label.

    Prompt and completion are written as those of a pair, but the prompt is never missing. Raises RowError, or UserError
    for an unsuitable chat template.
    """
    label, prompt, completion = (prompts.field(row, name) for name in ("label", "prompt", "completion"))
    if not isinstance(label, bool):
        raise RowError("field 'label' is neither true nor false", f"it is {type(label).__name__}")
    if isinstance(completion, str) and not isinstance(prompt, list):
        return replace(prompts.joined(prompts.text_field(row, "prompt"), completion), desirable=label)
    answer = [_answer(completion)] if isinstance(completion, str) else completion
    if not isinstance(answer, list) or not answer:
        raise RowError("field 'completion' is neither a string nor a list of messages")
    before = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    messages = list(_with_prompt(prompt, answer))
    if messages[: len(before)] != before:
        raise RowError("field 'completion' does not follow the prompt")
    turns = _answers(messages[len(before) :])
    document = chat.last_turns(conversation_of(dataset, _around(row, messages)), tokenizer, turns)
    return replace(document, desirable=label)


def _answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _with_prompt(prompt: object, completion: Sequence[Any]) -> Sequence[Any]:
    if isinstance(prompt, list):
        repeats = list(completion[: len(prompt)]) == prompt  # whole conversations, as UltraFeedback's
        return completion if repeats else [*prompt, *completion]
    if prompt is None or not isinstance(completion[0], dict) or completion[0].get("role") != "assistant":
        return completion
    if not isinstance(prompt, str):
        raise RowError("field 'prompt' is neither a string nor a list of messages", f"it is {type(prompt).__name__}")
    return [{"role": "user", "content": prompt}, *completion]


def _conversations(
    dataset: Dataset, row: Mapping[str, Any], pair: Sequence[Sequence[Any]], tokenizer: Tokenizer
) -> tuple[Example, Example]:
    shared = 0
    # each keeps its last message
    while shared < min(map(len, pair)) - 1 and pair[0][shared] == pair[1][shared]:
        shared += 1
    one, other = (
        chat.last_turns(conversation_of(dataset, _around(row, messages)), tokenizer, _answers(messages[shared:]))
        for messages in pair
    )
    return one, other


def _answers(messages: Sequence[Any]) -> int:
    from_assistant = [isinstance(message, dict) and message.get("role") == "assistant" for message in messages]
    return max(1, from_assistant.count(True))
