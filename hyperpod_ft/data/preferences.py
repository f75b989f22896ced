"""Preference rows: a prompt, a chosen and a rejected completion, as strings or as chat messages."""

from collections.abc import Mapping, Sequence
from typing import Any

from hyperpod_ft.data import chat, prompts
from hyperpod_ft.data.example import Example, RowError
from hyperpod_ft.data.tokenizer import Tokenizer


def render(row: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[Example, Example]:
    """The chosen and the rejected document, both with the prompt; only completions are trained.

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
        return [*prompt, *completion]
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
