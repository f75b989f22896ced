"""An answer's text, in the pieces in which it is made, as its parts.

Reasoning stands first, in <think>; a call is given once it is complete; no markup is given as content. Text that looks
like a call but is not one is content.
"""

from collections.abc import Collection

from hyperpod_ft.data.text.answer_format import CALL, CALL_END, PYTHON_TAG, THINK, THINK_END, AnswerFormat
from hyperpod_ft.serving.markup import calls
from hyperpod_ft.serving.markup.calls import Tools
from hyperpod_ft.serving.markup.parts import Content, Part, Reasoning


def begun(text: str, marks: Collection[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a mark."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0


class MarkupStream:
    """The parts of one answer. `marks`: what its text must still have when it gets here."""

    def __init__(self, form: AnswerFormat, tools: Tools = (), prompt: str = "") -> None:
        """Calls are read if there are `tools`. `prompt`: what the answer follows, which may have opened <think>."""
        self._tools = tools
        self._form = form.tools if tools else None
        self.marks = {THINK, THINK_END} if form.reasoning else set()
        if self._form:
            self.marks |= {PYTHON_TAG} if self._form == "llama3_json" else {CALL, CALL_END}
        self._thinks = form.reasoning and prompt.rstrip().endswith(THINK)
        self._step = self._beginning if form.reasoning else self._after_reasoning
        self._waiting, self._ended = "", False
        self._reasoning_text, self._content_text = _Trimmed(), _Trimmed()

    def feed(self, text: str, *, last: bool) -> list[Part]:
        """The parts that can be given after this piece of the text. `last`: it is the end."""
        self._waiting += text
        self._ended = last
        if not self.marks:
            text, self._waiting = self._waiting, ""
            return [Content(text)] if text else []
        found: list[Part] = []
        while (parts := self._step()) is not None:
            found += parts
        return found

    # Each step takes what it can of the waiting text, and may name the next one; None: it needs more text.

    def _beginning(self) -> list[Part] | None:
        start = self._waiting.lstrip()
        if start.startswith(THINK):
            self._waiting, self._thinks = start.removeprefix(THINK), True
        elif THINK.startswith(start) and not self._ended:
            return None
        self._step = self._reasoning if self._thinks else self._after_reasoning
        return []

    def _reasoning(self) -> list[Part] | None:
        text = self._before(THINK_END)
        if self._waiting.startswith(THINK_END):
            self._waiting, self._step = self._waiting.removeprefix(THINK_END), self._after_reasoning
        elif not text:
            return None
        return [Reasoning(given)] if (given := self._reasoning_text.add(text)) else []

    def _after_reasoning(self) -> list[Part]:
        if self._form is None:
            self._step = self._text
        else:
            self._step = self._whole_call if self._form == "llama3_json" else self._marked_calls
        return []

    def _text(self) -> list[Part] | None:
        text, self._waiting = self._waiting, ""
        return self._content(text) if text else None

    def _whole_call(self) -> list[Part] | None:
        start = self._waiting.lstrip()
        if start.startswith(("{", PYTHON_TAG)) or PYTHON_TAG.startswith(start):
            if not self._ended:
                return None
            if call := calls.read_bare_json(start, self._tools):
                self._waiting = ""
                return [call]
        self._step = self._text
        return []

    def _marked_calls(self) -> list[Part] | None:
        if text := self._before(CALL):
            return self._content(text)
        end = self._waiting.find(CALL_END)
        if not self._waiting or (end < 0 and not self._ended):
            return None
        # an answer may end without the second mark
        inside = self._waiting[len(CALL) : end if end >= 0 else None]
        whole = CALL + inside + (CALL_END if end >= 0 else "")
        self._waiting = self._waiting[len(whole) :]
        call = calls.read_json(inside) if self._form == "hermes" else calls.read_xml(inside, self._tools)
        return [call] if call else self._content(whole)

    def _before(self, mark: str) -> str:
        """Takes the text before the mark, or as much as surely stands before it."""
        place = self._waiting.find(mark)
        if place < 0:
            place = len(self._waiting) - (0 if self._ended else begun(self._waiting, (mark,)))
        text, self._waiting = self._waiting[:place], self._waiting[place:]
        return text

    def _content(self, text: str) -> list[Part]:
        return [Content(given)] if (given := self._content_text.add(text)) else []


class _Trimmed:
    """A text in pieces, without the white space at its ends, which only parts it from markup."""

    def __init__(self) -> None:
        self._blank, self._begun = "", False

    def add(self, piece: str) -> str:
        """What can be given after this piece: white space waits for what follows."""
        text = self._blank + piece if self._begun else piece.lstrip()
        given = text.rstrip()
        self._blank, self._begun = text[len(given) :], self._begun or bool(given)
        return given
