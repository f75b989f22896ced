"""The trained turns of a conversation: what a server renders before each, and what the chat template writes for it.

A template whose answer does not follow what asks for it, or that leaves out a part, is refused.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hyperpod_ft.data.text.conversation import IMAGE, Conversation
from hyperpod_ft.data.text.example import RowError
from hyperpod_ft.data.text.reasoning import KEY, answer_of, message_without, reasoning_of
from hyperpod_ft.data.text.rendering import ChatRenderer, Spans

TrainOn = Literal["all_turns", "last_turn"]

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


def turns(
    given: Conversation,
    renderer: ChatRenderer,
    *,
    train_on: TrainOn = "all_turns",
    reasoning_trained: bool = True,
) -> list[Turn]:
    """The trained turns, at least one. Raises RowError."""
    places = list(answers_in(given))
    if train_on == "last_turn":
        places = places[-1:]
    places = [place for place in places if place not in given.untrained]
    if not places:
        raise RowError("no answer to learn", "no trained message of the assistant follows one of the user or a tool")
    for place in places:
        message = given.messages[place]
        if not (message["content"].strip() or "tool_calls" in message or KEY in message):
            raise RowError("empty completion", f"message {place + 1}")
    shown = renderer.presentation.messages(given.messages)
    found = [_turn(given, renderer, shown, place, reasoning_trained) for place in places]
    _check_context(given, found[-1])
    if renderer.marks_turns:
        for row in examples_of(found):
            _compare_with_marks(row, given, renderer, shown)
    return found


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


def answers_in(given: Conversation) -> Iterator[int]:
    """The places of the assistant's messages that follow a request."""
    requested = False
    for place, message in enumerate(given.messages):
        if message["role"] == "assistant" and requested:
            yield place
        requested |= message["role"] in _REQUESTS


def _turn(
    given: Conversation, renderer: ChatRenderer, shown: Sequence[Mapping[str, Any]], place: int, reasoning_trained: bool
) -> Turn:
    message, where = given.messages[place], f"message {place + 1}"
    context = renderer.text(shown[:place], given, ask=True)
    after = renderer.text(shown[: place + 1], given)
    written = _continuation(given, renderer, shown, place, context, after)
    if written is None and reasoning_of(message) and not _OPEN.search(context):
        # the generation prompt closes what was thought before it began: only the answer can follow
        plain = renderer.presentation.messages([message_without(message)])
        after = renderer.text([*shown[:place], *plain], given)
        written = _continuation(given, renderer, [*shown[:place], *plain], place, context, after)
    if written is None:
        shared = shared_length(context, after)
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
    asks = len(context) - shared_length(context, renderer.text(shown[:place], given))
    # The turn made the template rewrite what is before it: the last request and the generation prompt are still there.
    kept, request = _common_tail(context, after), given.messages[place - 1]["content"].strip()
    if request and len(kept) > asks and _has_request(kept[: len(kept) - asks], request):
        return after[after.rindex(kept) + len(kept) :]
    shared = shared_length(context, after)
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


def shared_length(one: str, other: str) -> int:
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
            asked = shared_length(turn.context, renderer.text(shown[: turn.place], given))
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
