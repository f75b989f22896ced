"""Raw rows to text: each dataset format's prompt and completion, and which parts of the text count in the loss."""

from collections.abc import Mapping, Sequence
from typing import Any

from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.data.text import chat, prompts
from hyperpod_ft.data.text.example import Example, RowError
from hyperpod_ft.data.tokenizer import Tokenizer


def documents(dataset: Dataset, row: Mapping[str, Any], tokenizer: Tokenizer | None) -> tuple[Example, ...]:
    """The documents that a raw row becomes: itself, or of a preference the chosen one, then the rejected one.

    Raises what `render` raises.
    """
    if dataset.format != "preference":
        return (render(dataset, row, tokenizer),)
    assert tokenizer is not None
    return tuple(_checked(example) for example in _pair(row, tokenizer))


def render(dataset: Dataset, row: Mapping[str, Any], tokenizer: Tokenizer | None) -> Example:
    """A raw row as text; only chats need the tokenizer.

    Raises RowError, or UserError when the tokenizer's or the user's template is wrong.
    """
    if dataset.format == "chat":
        assert tokenizer is not None
        example = chat.render(_messages(row, "messages"), tokenizer, all_trained=dataset.loss_on == "all")
    elif dataset.format == "text":
        example = prompts.document(prompts.prompt(dataset, row))
    else:
        prompt, completion = prompts.prompt(dataset, row), prompts.completion(dataset, row)
        if dataset.max_target_length is not None and not prompt.strip():
            raise RowError("empty prompt", "an encoder-decoder needs a source")
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


def _pair(row: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[Example, Example]:
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
            answers = [[{"role": "assistant", "content": completion}] for completion in completions]
            return _conversations([[*prompt, *answer] for answer in answers], tokenizer)
        before = prompts.text_field(row, "prompt")
        one, other = (prompts.joined(before, completion) for completion in completions)
        return one, other
    if not all(isinstance(completion, list) and completion for completion in completions):
        raise RowError("fields 'chosen' and 'rejected' are neither two strings nor two lists of messages")
    return _conversations([_with_prompt(prompt, completion) for completion in completions], tokenizer)


def _with_prompt(prompt: object, completion: Sequence[Any]) -> Sequence[Any]:
    if isinstance(prompt, list):
        repeats = list(completion[: len(prompt)]) == prompt  # whole conversations, as UltraFeedback's
        return completion if repeats else [*prompt, *completion]
    if prompt is None or not isinstance(completion[0], dict) or completion[0].get("role") != "assistant":
        return completion
    if not isinstance(prompt, str):
        raise RowError("field 'prompt' is neither a string nor a list of messages", f"it is {type(prompt).__name__}")
    return [{"role": "user", "content": prompt}, *completion]


def _conversations(pair: Sequence[Sequence[Any]], tokenizer: Tokenizer) -> tuple[Example, Example]:
    shared = 0
    # each keeps its last message
    while shared < min(map(len, pair)) - 1 and pair[0][shared] == pair[1][shared]:
        shared += 1
    one, other = (chat.render(messages, tokenizer, last_answers=_answers(messages[shared:])) for messages in pair)
    return one, other


def _answers(messages: Sequence[Any]) -> int:
    from_assistant = [isinstance(message, dict) and message.get("role") == "assistant" for message in messages]
    return max(1, from_assistant.count(True))
