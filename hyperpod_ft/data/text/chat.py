"""Conversations as training examples: a server's prompt is the context, the answer that follows it is trained.

For each trained turn of the assistant, the context is what a server renders for the messages before it, and the target
is what the chat template writes for the turn, up to its end-of-turn token. As a conversation grows, some templates
rewrite its earlier turns: Qwen3 and gpt-oss drop their reasoning. So a turn shares an example with a later one only
where the later context begins with the earlier one and its answer; else the conversation is unrolled into several.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hyperpod_ft.data.text import conversation as conversations
from hyperpod_ft.data.text import rendering
from hyperpod_ft.data.text.conversation import IMAGE, REASONING, Conversation
from hyperpod_ft.data.text.example import Example, RowError, Segment
from hyperpod_ft.data.text.rendering import ChatRenderer, Spans
from hyperpod_ft.data.tokenizer import Tokenizer

TrainOn = Literal["all_turns", "last_turn"]

_REASONING = REASONING[0]
_INLINE = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
_OPEN = re.compile(r"<think>\s*\Z")
_REQUESTS = ("user", "tool")


@dataclass(frozen=True)
class Turn:
    """An answer of the assistant: `context` is what a server would render, `target` what is trained after it.

    `untrained`: the first characters of the target that are no part of the loss.
    """

    place: int
    context: str
    target: str
    untrained: int = 0
    loses_reasoning: bool = False  # the template does not write it

    @property
    def text(self) -> str:
        return self.context + self.target


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
        if given.untrained.intersection(_answers(given)):
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
    return asked[_shared(asked, renderer.text(renderer.presentation.messages(given.messages[:place]), given)) :]


def reasoning_of(message: Mapping[str, Any]) -> str:
    """What a message of the assistant has as its reasoning, under its own key or within its content."""
    inline = _INLINE.match(message["content"])
    return str(message.get(_REASONING) or (inline[1] if inline else "")).strip()


def answer_of(message: Mapping[str, Any]) -> str:
    """A message's content without reasoning."""
    return str(_without_reasoning(message)["content"]).strip()


def without_reasoning(given: Conversation) -> Conversation:
    """The conversation whose answers have no reasoning."""
    return replace(given, messages=tuple(map(_without_reasoning, given.messages)))


def turns(
    given: Conversation,
    renderer: ChatRenderer,
    *,
    train_on: TrainOn = "all_turns",
    reasoning_trained: bool = True,
) -> list[Turn]:
    """The trained turns, at least one. Raises RowError."""
    places = list(_answers(given))
    if train_on == "last_turn":
        places = places[-1:]
    places = [place for place in places if place not in given.untrained]
    if not places:
        raise RowError("no answer to learn", "no trained message of the assistant follows one of the user or a tool")
    for place in places:
        message = given.messages[place]
        if not (message["content"].strip() or "tool_calls" in message or _REASONING in message):
            raise RowError("empty completion", f"message {place + 1}")
    shown = renderer.presentation.messages(given.messages)
    found = [_turn(given, renderer, shown, place, reasoning_trained) for place in places]
    _check_context(given, found[-1])
    if renderer.marks_turns:
        for row in examples_of(found):
            _compare_with_marks(row, given, renderer, shown)
    return found


def _check_context(given: Conversation, last: Turn) -> None:
    """Raises RowError for tools, and messages other than answers, that the template leaves out of the context."""
    for tool in given.tools or ():
        if tool["function"]["name"] not in last.context:
            raise RowError("chat template omits the tools")
    for place, message in enumerate(given.messages[: last.place]):
        content = message["content"].replace(IMAGE, "\n")
        lines = [line.strip() for line in content.splitlines() if line.strip()]
        if lines and message["role"] != "assistant" and not _is_written(lines[0], last.context):
            raise RowError("chat template omits a message", f"message {place + 1}, of role {message['role']}")


def _is_written(line: str, text: str) -> bool:
    """Whether a text has a line as it is, as a part of a JSON string, or word by word in another notation."""
    return line in text or json.dumps(line)[1:-1] in text or all(word in text for word in re.findall(r"\w+", line)[:8])


def _compare_with_marks(
    row: Sequence[Turn], given: Conversation, renderer: ChatRenderer, shown: Sequence[Mapping[str, Any]]
) -> None:
    """Raises RowError where the template's own marks leave out a part of a turn, or include a part of its request."""
    text, spans = renderer.marked(shown[: row[-1].place + 1], given)
    for turn in row:
        where, start = f"message {turn.place + 1}", len(turn.context)
        if not text.startswith(turn.text):
            raise RowError(
                "chat template's {% generation %} marks another text than an answer to its generation prompt",
                f"{where}: {turn.target[:40]!r}, but {text[start:][:40]!r}",
            )
        if missing := _outside(text, (start, len(turn.text)), spans):
            raise RowError(
                "chat template's {% generation %} leaves out a part of an answer", f"{where}: {missing[:40]!r}"
            )
        request = given.messages[turn.place - 1]["content"]
        if request.strip() and _is_marked(request, turn.context, spans):
            # or a part of the generation prompt: `a` is one of `assistant`
            asked = _shared(turn.context, renderer.text(shown[: turn.place], given))
            if _is_marked(request, turn.context[:asked], spans):
                raise RowError(
                    "chat template's {% generation %} marks a part of a request", f"{where}: {request[:40]!r}"
                )


def _is_marked(request: str, context: str, spans: Spans) -> bool:
    at = context.rfind(request)
    return at >= 0 and _outside(context, (at, at + len(request)), spans) != request


def _outside(text: str, within: tuple[int, int], spans: Spans) -> str:
    """The characters of `text[slice(*within)]` that are in no span; empty if they are only spaces."""
    start, stop = within
    kept, at = [], start
    for first, last in sorted(spans):
        kept.append(text[at : min(max(first, at), stop)])
        at = min(max(at, last), stop)
    found = "".join([*kept, text[at:stop]])
    return found if found.strip() else ""


def _answers(given: Conversation) -> Iterator[int]:
    requested = False
    for place, message in enumerate(given.messages):
        if message["role"] == "assistant" and requested:
            yield place
        requested |= message["role"] in _REQUESTS


def _without_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message["role"] != "assistant":
        return message
    kept = {key: value for key, value in message.items() if key != _REASONING}
    return kept | {
        "content": _INLINE.sub("", kept["content"], count=1) if _INLINE.match(kept["content"]) else kept["content"]
    }


def _turn(
    given: Conversation, renderer: ChatRenderer, shown: Sequence[Mapping[str, Any]], place: int, reasoning_trained: bool
) -> Turn:
    message, where = given.messages[place], f"message {place + 1}"
    context = renderer.text(shown[:place], given, ask=True)
    after = renderer.text(shown[: place + 1], given)
    written = _continuation(given, renderer, shown, place, context, after)
    if written is None and reasoning_of(message) and not _OPEN.search(context):
        # the generation prompt closes what was thought before it began: only the answer can follow
        plain = renderer.presentation.messages([_without_reasoning(message)])
        after = renderer.text([*shown[:place], *plain], given)
        written = _continuation(given, renderer, [*shown[:place], *plain], place, context, after)
    if written is None:
        shared = _shared(context, after)
        raise RowError(
            "chat template begins an answer differently than it asks for one",
            f"{where}: {context[shared:][:40]!r}, but {after[shared:][:40]!r}",
        )
    target = written.rstrip()
    _check_shown(message, target, where)
    thought = reasoning_of(message)
    found = target.find(thought) if thought else -1
    untrained = found + len(thought) if found >= 0 and not reasoning_trained else 0
    return Turn(place, context, target, untrained, bool(thought) and found < 0)


def _continuation(
    given: Conversation,
    renderer: ChatRenderer,
    shown: Sequence[Mapping[str, Any]],
    place: int,
    context: str,
    after: str,
) -> str | None:
    """How `after`, the text with the turn, continues `context`, the text that asks for it; None if it does not."""
    if after.startswith(context):
        return after[len(context) :]
    asks = len(context) - _shared(context, renderer.text(shown[:place], given))
    # The turn made the template rewrite what is before it: the last request and the generation prompt are still there.
    kept, request = _common_tail(context, after), given.messages[place - 1]["content"].strip()
    if request and len(kept) > asks and _has_request(kept[: len(kept) - asks], request):
        return after[after.rindex(kept) + len(kept) :]
    shared = _shared(context, after)
    if shared < len(context) - asks:
        return None
    if not context[shared:].strip():
        return after[shared:]
    if (thinking := _OPEN.search(context)) and after.startswith(context[: thinking.start()]):
        # as DeepSeek-R1: asks for thoughts, and leaves them out of the answers that it writes
        answer = after[thinking.start() :].lstrip("\n")
        return f"{reasoning_of(given.messages[place])}\n</think>\n\n{answer}"
    return None


def _common_tail(context: str, after: str) -> str:
    """The longest end of `context` that `after` has."""
    low, high = 0, len(context)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if context[-middle:] in after else (low, middle - 1)
    return context[len(context) - low :]


def _shared(one: str, other: str) -> int:
    """How many characters both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def _has_request(text: str, content: str) -> bool:
    return content in text or json.dumps(content)[1:-1] in text


def _check_shown(message: Mapping[str, Any], target: str, where: str) -> None:
    answer, at = answer_of(message), 0
    for line in () if answer in target else answer.splitlines():
        at = target.find(line.strip(), at)
        if at < 0:
            raise RowError("chat template omits a part of the answer", f"{where}: {line.strip()[:40]!r}")
    if not target.strip():
        raise RowError("chat template omits the answer", where)
    for call in message.get("tool_calls", ()):
        if call["function"]["name"] not in target:
            raise RowError("chat template omits the tool calls", where)


def examples_of(found: Sequence[Turn]) -> list[list[Turn]]:
    """The turns of each example: those that lie in the context of its last turn as they were answered."""
    rows: list[list[Turn]] = []
    for turn in reversed(found):
        for row in rows:
            if row[-1].context.startswith(turn.text) and row[0].context.startswith(turn.text):
                row.insert(0, turn)
                break
        else:
            rows.append([turn])
    return rows[::-1]


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
