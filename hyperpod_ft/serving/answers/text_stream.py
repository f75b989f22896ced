"""The text of an answer while its tokens are made: whole characters only, and no part of a stop text."""

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"  # what a decoder writes for the first bytes of a character


class TextStream:
    """Gives the new text after each token. `text` is the whole of it, `stopped`: it has reached a stop text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._decode, self._stops = decode, stops
        self._given = 0
        self.text = ""
        self.stopped = False

    def update(self, ids: Sequence[int], *, last: bool) -> str:
        """The text to send after the tokens `ids`, all of the answer so far. `last`: no further token follows."""
        text = self._decode(ids)
        if found := [place for stop in self._stops if (place := text.find(stop)) >= 0]:
            text, self.stopped = text[: min(found)], True
        self.text = text
        ready = len(text) if last or self.stopped else len(text) - self._held_back(text)
        piece = text[self._given : ready]
        self._given = max(self._given, ready)
        return piece

    def _held_back(self, text: str) -> int:
        """How many characters at the end may still change or become part of a stop text."""
        whole = text.rstrip(_INCOMPLETE)
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(whole)), 0, -1):
            if any(stop.startswith(whole[-length:]) for stop in self._stops):
                return len(text) - len(whole) + length
        return len(text) - len(whole)
