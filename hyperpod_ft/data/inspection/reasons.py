"""Why each character of an example's text is there: which message it is of, or the chat template's markup."""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.data.inspection.shown import Reason
from hyperpod_ft.data.text import chat, rendering
from hyperpod_ft.data.text.conversation import IMAGE, Conversation
from hyperpod_ft.data.text.example import Example, RowError
from hyperpod_ft.data.text.reasoning import answer_of, reasoning_of
from hyperpod_ft.data.tokenizer import Tokenizer

_ROLES: dict[str, Reason] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "ipython"), "tool"),
    "assistant": "assistant",
}
_END_OF_REASONING = re.compile(r"(<think>)?\s*</think>\s*")


def of_characters(example: Example, dataset: Dataset, tokenizer: Tokenizer | None) -> list[Reason]:
    """The reason of each character of the example's text; only conversations need the tokenizer."""
    if example.conversation is not None:
        assert tokenizer is not None
        return _Painting.of(example, example.conversation, tokenizer).reasons
    if dataset.format in ("text", "prompt"):
        return ["text" if dataset.format == "text" else "prompt"] * len(example.segments[0].text)
    *prompt, completion = (len(segment.text) for segment in example.segments)
    found: list[Reason] = ["prompt"] * sum(prompt)
    found += ["completion"] * completion
    return found


@dataclass
class _Painting:
    """The text of a conversation, painted from its end to its beginning, so that a message is found before the next.

    What nothing paints is the template's own. `end`: everything from this character on is painted.
    """

    text: str
    searched: str  # without special tokens, which no message is looked for in; as long as the text
    given: Conversation
    tokenizer: Tokenizer
    end: int
    reasons: list[Reason] = field(default_factory=list)

    @classmethod
    def of(cls, example: Example, given: Conversation, tokenizer: Tokenizer) -> "_Painting":
        text = "".join(segment.text for segment in example.segments)
        special = "|".join(re.escape(token) for token in sorted(tokenizer.all_special_tokens, key=len, reverse=True))
        searched = re.sub(special, lambda match: "\0" * len(match[0]), text) if special else text
        made = cls(text, searched, given, tokenizer, len(text), ["template"] * len(text))
        answers = dict(zip(example.places, _answers(example), strict=True))
        for place in range(example.places[-1], -1, -1):
            if place in answers:
                made._paint_answer(place, *answers[place])
            else:
                made._paint_message(place, is_followed_by_answer=place + 1 in answers)
        return made

    def _paint(self, reason: Reason, start: int, stop: int) -> None:
        self.reasons[start:stop] = [reason] * (stop - start)
        self.end = min(self.end, start)

    def _paint_answer(self, place: int, start: int, stop: int) -> None:
        message = self.given.messages[place]
        ends = stop - len(rendering.of(self.tokenizer, self.given).end(self.text[start:stop]))
        self._paint("end of turn", ends, stop)
        begins, thought = start, reasoning_of(message)
        if thought and (at := self.text.find(thought, start, ends)) >= 0:
            begins = at + len(thought)
            self._paint("reasoning", at, begins)
        if closing := _END_OF_REASONING.match(self.text, begins, ends):
            begins = closing.end()
        answer = answer_of(message)
        at = self.text.find(answer, begins, ends) if answer else -1
        self._paint("answer", at if at >= 0 else begins, ends)
        header = ""
        with contextlib.suppress(RowError):
            header = chat.generation_prompt(self.given, self.tokenizer, place)
        self._paint("header", start - len(header) if self.text.endswith(header, 0, start) else start, start)

    def _paint_message(self, place: int, *, is_followed_by_answer: bool) -> None:
        message = self.given.messages[place]
        end = self.end if is_followed_by_answer else self._end_of(place)
        for part in _parts(message):
            at, length = max((self._before(written, end), len(written)) for written in _written(part))
            if at >= 0:
                self._paint(_ROLES.get(message["role"], "user"), at, at + length)
                end = at

    def _before(self, part: str, end: int) -> int:
        at = self.searched.rfind(part, 0, end)
        return at if at >= 0 else self.text.rfind(part, 0, end)

    def _end_of(self, place: int) -> int:
        """Where the message at a place has ended, if the text of the messages up to it is the beginning of the whole.

        Short messages would else be found in markup after them: `a` in `assistant`.
        """
        renderer = rendering.of(self.tokenizer, self.given)
        with contextlib.suppress(RowError):
            before = renderer.text(renderer.presentation.messages(self.given.messages[: place + 1]), self.given)
            if self.text.startswith(before.rstrip()):
                return len(before.rstrip())
        return self.end


def _answers(example: Example) -> Iterator[tuple[int, int]]:
    """Where each answer that is trained begins and ends; segments are contexts and answers by turns."""
    at = 0
    for number, segment in enumerate(example.segments):
        if number % 2:
            yield at, at + len(segment.text)
        at += len(segment.text)


def _parts(message: Mapping[str, Any]) -> list[str]:
    """What a message may have in the text, last part first."""
    if message["role"] != "assistant":
        texts = [text.strip() for text in message["content"].split(IMAGE)]
        return [text for text in reversed(texts) if text]
    return [part for part in (answer_of(message), reasoning_of(message)) if part]


def _written(part: str) -> tuple[str, ...]:
    """How a template may write a part: as it is, or within JSON."""
    return part, json.dumps(part, ensure_ascii=False)[1:-1], json.dumps(part)[1:-1]
