"""The terminal: a screen of rich's, single keys, and everything as it was before on every way out."""

import contextlib
import os
import re
import select
import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from rich.live import Live

from hyperpod_ft.cli.output.tables import console

# What asks to end; SIGINT is Ctrl-C.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_SUSPEND = "\x1a"  # Ctrl-Z
_SEQUENCE = re.compile(r"\x1b\[[\d;]*[A-Za-z~]|.", re.DOTALL)  # ECMA-48
_KEYS = {"\x1b[A": "up", "\x1b[B": "down", "\r": "enter", "\n": "enter", "\x1b": "escape"}


def can_draw() -> bool:
    """Whether this process has a terminal to itself, with a cursor that moves and characters beyond ASCII."""
    if not (sys.stdin.isatty() and sys.stdout.isatty() and console().is_interactive) or console().options.ascii_only:
        return False
    return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()  # not in the background


class Terminal:
    """The screen and the keys of this process, as `opened` yields it."""

    def __init__(self) -> None:
        self._input = sys.stdin.fileno()
        self._modes = termios.tcgetattr(self._input)
        self.screen = Live(console=console(), screen=True, auto_refresh=False)

    def keys(self, seconds: float) -> list[str]:
        """The keys pressed since the last call, by name; waits for the first until `seconds` pass.

        Ctrl-Z suspends the process, as it would without a view.
        """
        if not select.select([self._input], [], [], seconds)[0]:
            return []
        typed = os.read(self._input, 4096)
        if not typed:
            raise SystemExit(128 + signal.SIGHUP)  # the terminal is gone
        found = _SEQUENCE.findall(typed.decode("utf-8", "replace"))
        if _SUSPEND in found:
            self.release()
            os.kill(0, signal.SIGTSTP)  # the whole group, as the terminal does
            self.take()  # continued
        return [_KEYS.get(key, key) for key in found]

    def take(self) -> None:
        self._modes = termios.tcgetattr(self._input)  # the shell may have changed them meanwhile
        modes = [*self._modes[:6], list(self._modes[6])]
        modes[3] &= ~(termios.ICANON | termios.ECHO)
        modes[6][termios.VSUSP] = bytes([os.fpathconf(self._input, "PC_VDISABLE")])  # arrives as a key
        termios.tcsetattr(self._input, termios.TCSADRAIN, modes)
        self.screen.start()

    def release(self) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            self.screen.stop()
        with contextlib.suppress(OSError, termios.error):
            # keys that were meant for the view do not reach the shell
            termios.tcsetattr(self._input, termios.TCSAFLUSH, self._modes)


@contextmanager
def opened() -> Iterator[Terminal]:
    """The terminal, taken for the block and restored after it, whatever ends it.

    Signals that ask to end raise, once: KeyboardInterrupt or SystemExit.
    """
    terminal = Terminal()
    handlers = {number: signal.signal(number, _end) for number in _ENDING}
    try:
        terminal.take()
        yield terminal
    finally:
        _ignore_endings()
        terminal.release()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end(number: int, _frame: object) -> NoReturn:
    _ignore_endings()
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)  # as shells report it


def _ignore_endings() -> None:
    """Nothing may interrupt the giving back."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
