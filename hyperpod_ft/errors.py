"""User-facing errors, and removal of characters that control a terminal.

Each error reaches the terminal as one line and exit code 2; anything else is a bug.
"""

from __future__ import annotations  # containers import it before they have the kit's Python

import difflib
import errno
import sys
from collections.abc import Iterable


def printable(text: str, keep: str = "") -> str:
    """`text` with a `?` for each character that does not print, except those in `keep`.

    Models, programs and names of tensors may hold sequences that control a terminal.
    """
    return "".join(character if character.isprintable() or character in keep else "?" for character in text)


EXIT_USER_ERROR = 2
VOLUME_FULL = (errno.ENOSPC, errno.EDQUOT)
# Errors of the volume, where a traceback does not help.
VOLUME_ERRORS = (*VOLUME_FULL, errno.EIO, errno.EROFS, errno.EACCES, errno.ESTALE)
_MAX_LENGTH = 200


class UserError(Exception):
    """One line: where, what is wrong, and what to do about it.

    >>> str(UserError("model.source: no such directory: /fsx/llama", "set it to a Hub id or a directory"))
    'model.source: no such directory: /fsx/llama; set it to a Hub id or a directory'
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        """`problem` says where and what is wrong, `remedy` what to do. Line breaks become spaces, and what does
        not print a `?`: names of files and keys may hold sequences that control a terminal.
        """
        super().__init__(_one_line(f"{problem}; {remedy}" if remedy else problem))
        self.problem, self.remedy = _one_line(problem), _one_line(remedy)


class ConfigError(UserError):
    """Every problem of one file, a line each, so that a user can correct them all at once."""

    def __init__(self, problems: list[str]) -> None:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(problems[0] + more)  # where an error is part of a line
        self.problems = [_one_line(problem) for problem in problems]

    def __str__(self) -> str:
        return "\n".join(self.problems)


def print_error(where: str, message: str) -> None:
    """Print a user's error to stderr, each line marked `error: ` and with the stage or the node."""
    for line in message.splitlines():
        print(f"error: {where}: {printable(line)}", file=sys.stderr, flush=True)


def first_sentence(error: BaseException) -> str:
    """The first sentence of another library's error message, from its first line, 200 characters at most."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    sentence = line.split(". ")[0].removesuffix(".")
    return sentence if len(sentence) <= _MAX_LENGTH else f"{sentence[:_MAX_LENGTH]}..."


def file_of(error: OSError) -> str:
    """The file that an error is about; empty when it names none. For a copy or a rename, the destination."""
    return str(error.filename2 or error.filename or "")


def volume_failure(error: OSError) -> tuple[str, int]:
    """The line for a failure of the volume, and the exit status for it. Raises `error` itself if it is another.

    An I/O error may pass: its status has ranks started again, as after a crash.
    """
    if error.errno not in VOLUME_ERRORS:
        raise error
    line = f"{file_of(error) or 'the volume'}: {error.strerror}; free or repair the volume, then resume"
    return line, 1 if error.errno == errno.EIO else EXIT_USER_ERROR


def last_line(text: str) -> str:
    """The last line of a program's output that is not blank, stripped; empty when there is none."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown word: the closest known one, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def hub_http_error() -> type[Exception]:
    """The base of all errors of huggingface_hub's HTTP library: requests in 0.x, httpx in 1.x, httpx2 in 2.x.

    The Hub's own errors derive from it, too. Callers have imported huggingface_hub; this module has not.
    """
    from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415

    kinds = HfHubHTTPError.__mro__
    base: type[Exception] = [
        kind for kind in kinds if kind.__module__.partition(".")[0] not in ("huggingface_hub", "builtins")
    ][-1]
    return base


def hub_status(error: Exception) -> int:
    """The HTTP status of the Hub's answer; 0 if there was none."""
    return getattr(getattr(error, "response", None), "status_code", 0)
