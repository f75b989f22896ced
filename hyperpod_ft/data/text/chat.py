"""Conversations as training examples: a server's prompt is the context, the answer that follows it is trained.

For each trained turn of the assistant, the context is what a server renders for the messages before it, and the target
is what the chat template writes for the turn, up to its end-of-turn token. As a conversation grows, some templates
rewrite its earlier turns: Qwen3 and gpt-oss drop their reasoning. So a turn shares an example with a later one only
where the later context begins with the earlier one and its answer; else the conversation is unrolled into several.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hyperpod_ft.data.text import conversation as conversations
from hyperpod_ft.data.text import rendering
from hyperpod_ft.data.text.conversation import Conversation
from hyperpod_ft.data.text.example import Example, RowError, Segment
from hyperpod_ft.data.text.rendering import ChatRenderer
from hyperpod_ft.data.text.turns import TrainOn, Turn, answers_in, examples_of, shared_length, turns
from hyperpod_ft.data.tokenizer import Tokenizer


def examples(
    given: Conversation,
    tokenizer: Tokenizer,
    *,
    train_on: TrainOn = "all_turns",
    reasoning_trained: bool = True,
    all_trained: bool = False,
) -> list[Example]:
    """The examples of a conversation, in the order of their last turns.

    Each has the turns that one text can hold; `alone` has them apart, for where the tokens of that text are not those
    of each turn. With `all_trained`, one example, whose context is trained too. Raises RowError, or UserError for a
    tokenizer without a chat template.
    """
    renderer = rendering.of(tokenizer, given)
    found = turns(given, renderer, train_on=train_on, reasoning_trained=reasoning_trained)
    if all_trained:
        if given.untrained.intersection(answers_in(given)):
            raise RowError("an answer of weight 0, where dataset.loss_on trains everything")
        last = _example([found[-1]], given, renderer)
        return [replace(last, segments=tuple(replace(segment, trained=True) for segment in last.segments))]
    return [_example(row, given, renderer) for row in examples_of(found)]


def last_turns(given: Conversation, tokenizer: Tokenizer, count: int) -> Example:
    """The last `count` answers of a conversation as one example. Raises RowError, also if it is several."""
    if given.messages[-1]["role"] != "assistant":
        raise RowError("last message is not from the assistant", f"its role is {given.messages[-1]['role']!r}")
    renderer = rendering.of(tokenizer, given)
    rows = examples_of(turns(given, renderer)[-count:])
    if len(rows) > 1:
        raise RowError("completion of several turns that the chat template rewrites", f"{count} turns of the assistant")
    return _example(rows[0], given, renderer)


def prompt(
    messages: Sequence[Any],
    tokenizer: Tokenizer,
    *,
    tools: Any = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The text that the assistant's answer follows; an answer at the end of the conversation is left out.

    Raises RowError, or UserError for a tokenizer without a chat template.
    """
    return asked(conversations.of_messages(messages, tools=tools, template_kwargs=template_kwargs), tokenizer)


def asked(given: Conversation, tokenizer: Tokenizer) -> str:
    """The text that the conversation's next answer follows, or its last message if that is one.

    Raises what `prompt` raises.
    """
    return request(given, tokenizer, len(given.messages) - (given.messages[-1]["role"] == "assistant"))


def request(given: Conversation, tokenizer: Tokenizer, place: int) -> str:
    """The text that the answer at a place of a conversation follows. Raises what `prompt` raises."""
    renderer = rendering.of(tokenizer, given)
    return renderer.text(renderer.presentation.messages(given.messages[:place]), given, ask=True)


def generation_prompt(given: Conversation, tokenizer: Tokenizer, place: int) -> str:
    """The end of `request` that only asks for the answer."""
    renderer = rendering.of(tokenizer, given)
    asked = request(given, tokenizer, place)
    return asked[shared_length(asked, renderer.text(renderer.presentation.messages(given.messages[:place]), given)) :]


def _example(row: Sequence[Turn], given: Conversation, renderer: ChatRenderer) -> Example:
    segments, written = [], 0
    for turn in row:
        segments.append(Segment(turn.context[written:], False))
        segments.append(Segment(turn.target, True, turn.untrained))
        written = len(turn.text)
    last = row[-1]
    end = renderer.end(last.target)
    return Example(
        last.context,
        last.target.removesuffix(end).strip(),
        tuple(segments),
        templated=True,
        conversation=given,
        places=tuple(turn.place for turn in row),
        loses_reasoning=sum(turn.loses_reasoning for turn in row),
    )


def alone(example: Example) -> list[Example]:
    """The turns of an example, each as one of its own; in the first, what the template does not write is counted."""
    made = []
    for number, place in enumerate(example.places):
        context = "".join(segment.text for segment in example.segments[: 2 * number + 1])
        target = example.segments[2 * number + 1]
        segments = (Segment(context, False), target)
        lost = 0 if number else example.loses_reasoning
        of_turn = replace(example, prompt=context, completion=target.text, segments=segments, places=(place,))
        made.append(replace(of_turn, loses_reasoning=lost))
    return [*made[:-1], replace(made[-1], completion=example.completion)]
