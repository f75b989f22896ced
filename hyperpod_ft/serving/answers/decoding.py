"""How one answer is made: on which device and whose turn it is there, from scores to tokens, from tokens to text."""

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hyperpod_ft.data.tokenizer import Tokenizer
from hyperpod_ft.errors import UserError, first_sentence
from hyperpod_ft.serving.http.openai_api import Request
from hyperpod_ft.serving.markup.stream import begun


def device_named(name: str) -> torch.device:
    """`auto` is the GPU if torch finds one. Raises UserError for one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: {first_sentence(error)}", "use auto, cpu or cuda") from error


def is_usable(device: torch.device) -> bool:
    """Whether the device still computes: after some errors, such as a failed assertion in a kernel, it never does."""
    try:
        torch.ones(1, device=device).add_(1).item()
    except RuntimeError:
        return False
    return True


class FairLock:
    """A lock that threads acquire in the order in which they requested it.

    The holder computes. Released after every token, it lets several answers proceed side by side.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._held = False

    def acquire(self) -> None:
        with self._guard:
            if not self._held:
                self._held = True
                return
            ticket = threading.Lock()
            ticket.acquire()
            self._waiting.append(ticket)
        # released by the holder before, who keeps the lock held for this thread
        ticket.acquire()

    def release(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Draw(LogitsProcessor):
    """Draws the next token, with its own random numbers, and leaves only that one for greedy search to take.

    `generate` itself would draw from torch's one generator, which all threads share: a seed would mean nothing.
    """

    def __init__(self, temperature: float, top_p: float, generator: torch.Generator) -> None:
        self._temperature, self._top_p, self._generator = temperature, top_p, generator

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        del input_ids
        chances, order = torch.softmax(scores.float() / self._temperature, -1).sort(descending=True)
        # the most likely tokens, until they have top_p together
        chances[chances.cumsum(-1) - chances >= self._top_p] = 0
        drawn = order.gather(-1, torch.multinomial(chances, 1, generator=self._generator))
        return torch.full_like(scores, -torch.inf).scatter(-1, drawn, 0.0)


def sampling(request: Request, device: torch.device) -> LogitsProcessorList:
    """What `generate` is given for a request; empty for a greedy answer."""
    if not request.temperature:
        return LogitsProcessorList()
    generator = torch.Generator(device)
    if request.seed is None:
        generator.seed()
    else:
        generator.manual_seed(request.seed)
    # at 0 no token would be left
    return LogitsProcessorList([_Draw(request.temperature, max(request.top_p, 1e-9), generator)])


def decoder(tokenizer: Tokenizer, marks: Collection[str]) -> Callable[[Sequence[int]], str]:
    """What makes an answer's text of its tokens: without special tokens, except those that are `marks`."""
    library = tokenizer.backend_tokenizer
    added = library.get_added_tokens_decoder()
    hidden = {number for number, token in added.items() if token.special and token.content not in marks}
    return lambda ids: str(library.decode([one for one in ids if one not in hidden], skip_special_tokens=False))


_INCOMPLETE = "\ufffd"  # what a decoder writes for the first bytes of a character


class TextStream:
    """Gives the new text after each token: whole characters only, and no part of a stop text.

    `text` is the whole of it, `stopped`: it has reached a stop text.
    """

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
        return len(text) - len(whole) + begun(whole, self._stops)
