"""The terminal: the whole screen, single keys, and everything as it was before on every way out."""

import contextlib
import os
import re
import select
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console, ConsoleDimensions, RenderableType

# What asks to end; SIGINT is Ctrl-C.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_SUSPEND = "\x1a"  # Ctrl-Z
_SEQUENCE = re.compile(r"\x1b(?:\[[\d;]*[A-Za-z~]|O[A-Z])|.", re.DOTALL)
_INCOMPLETE = re.compile(rb"\x1b(?:\[[\d;]*|O)?$")
_SEQUENCE_SECONDS = 0.05  # between the bytes of one key, over a slow line
# ECMA-48 and xterm: https://invisible-island.net/xterm/ctlseqs/ctlseqs.html
_KEYS = {
    **{"\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left"},
    **{"\x1bOA": "up", "\x1bOB": "down", "\x1bOC": "right", "\x1bOD": "left"},
    **{"\x1b[5~": "page up", "\x1b[6~": "page down"},
    **{"\x1b[H": "home", "\x1b[1~": "home", "\x1bOH": "home", "\x1b[F": "end", "\x1b[4~": "end", "\x1bOF": "end"},
    **{"\r": "enter", "\n": "enter", "\x1b": "escape"},
}


def can_draw() -> bool:
    """Whether this process has a terminal to itself, with a cursor that moves and characters beyond ASCII."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown") or "utf" not in sys.stdout.encoding.lower():
        return False
    return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()  # not in the background


class Terminal:
    """The screen and the keys of this process, as `opened` yields it."""

    def __init__(self) -> None:
        self._input, self._output = sys.stdin.fileno(), sys.stdout.fileno()
        self._console = Console(highlight=False, force_terminal=True)
        self.height = 24  # cells, when it was drawn last
        self._modes = termios.tcgetattr(self._input)
        self._handlers: dict[signal.Signals, Any] = {}
        self._woken, self._wakes = os.pipe()
        os.set_blocking(self._wakes, False)

    def wake(self) -> None:
        """End the wait for keys. From any thread."""
        with contextlib.suppress(OSError):  # full: it will end anyway; closed: nobody waits
            os.write(self._wakes, b"\0")

    def draw(self, make: Callable[[int, int], RenderableType]) -> None:
        """Draw over the whole screen what `make` returns for its width and height in cells."""
        width, height = os.get_terminal_size(self._output)
        width, self.height = width or 80, height or 24
        self._console.size = ConsoleDimensions(width, self.height)
        self._console.update_screen(make(width, self.height))

    def keys(self, seconds: float) -> list[str]:
        """The keys pressed since the last call, by name; waits for them until `seconds` pass or `wake` is called.

        Ctrl-Z suspends the process, as it would without a view.
        """
        ready, _, _ = select.select([self._input, self._woken], [], [], seconds)
        if self._woken in ready:
            os.read(self._woken, 4096)
        if self._input not in ready:
            return []
        typed = os.read(self._input, 4096)
        if not typed:
            raise SystemExit(128 + signal.SIGHUP)  # the terminal is gone
        while _INCOMPLETE.search(typed) and select.select([self._input], [], [], _SEQUENCE_SECONDS)[0]:
            typed += os.read(self._input, 4096)
        found = _SEQUENCE.findall(typed.decode("utf-8", "replace"))
        if _SUSPEND in found:
            self._suspend()
        return [_KEYS.get(key, key) for key in found if key != _SUSPEND]

    def begin(self) -> None:
        """Take the screen and the keys. Signals that ask to end raise, once: KeyboardInterrupt or SystemExit."""
        for number in _ENDING:
            self._handlers[number] = signal.signal(number, self._end)
        self._handlers[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda *_: self.wake())
        self._take()

    def restore(self) -> None:
        """Everything as it was before `begin`."""
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)  # nothing may interrupt this
        self._release()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for descriptor in (self._woken, self._wakes):
            os.close(descriptor)

    def _take(self) -> None:
        self._modes = termios.tcgetattr(self._input)  # the shell may have changed them meanwhile
        modes = [*self._modes[:6], list(self._modes[6])]
        modes[3] &= ~(termios.ICANON | termios.ECHO)
        disabled = bytes([os.fpathconf(self._input, "PC_VDISABLE")])
        for character in (termios.VSUSP, termios.VQUIT):  # arrive as keys
            modes[6][character] = disabled
        termios.tcsetattr(self._input, termios.TCSADRAIN, modes)
        self._console.set_alt_screen(True)
        self._console.show_cursor(False)

    def _release(self) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            self._console.show_cursor(True)
            self._console.set_alt_screen(False)
        with contextlib.suppress(OSError, termios.error):
            # keys that were meant for the view do not reach the shell
            termios.tcsetattr(self._input, termios.TCSAFLUSH, self._modes)

    def _suspend(self) -> None:
        self._release()
        os.kill(0, signal.SIGTSTP)  # the whole group, as the terminal does
        self._take()  # continued

    @staticmethod
    def _end(number: int, frame: FrameType | None) -> NoReturn:
        del frame
        for other in _ENDING:
            signal.signal(other, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)  # as shells report it


@contextmanager
def opened() -> Iterator[Terminal]:
    """The terminal, taken for the block and restored after it, whatever ends it."""
    terminal = Terminal()
    try:
        terminal.begin()
        yield terminal
    finally:
        terminal.restore()
