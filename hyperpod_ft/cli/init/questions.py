"""Questions on a terminal: each answer is checked when it is given, and none is lost."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import typer

from hyperpod_ft.errors import UserError


@dataclass(frozen=True)
class Question:
    """What an option would have said."""

    option: str
    text: str
    given: str | None  # by the option
    check: Callable[[str], object]  # raises UserError for a wrong answer


@dataclass
class Interview:
    """Questions, and the answers given until now, as options."""

    options: list[str] = field(default_factory=list)

    def ask(self, *questions: Question) -> list[str]:
        """The answers, asked for where no option gives them, and again where they are wrong.

        Raises UserError when an option is wrong, before anything is asked, or missing where there is no terminal.
        """
        for question in questions:
            if question.given:
                question.check(question.given)
            elif not sys.stdin.isatty():
                raise UserError(f"{question.option} is missing, and this is not a terminal", f"give {question.option}")
        return [question.given or self._answer(question) for question in questions]

    def _answer(self, question: Question) -> str:
        while True:
            answer: str = typer.prompt(question.text)
            try:
                question.check(answer)
            except UserError as error:
                print(error, file=sys.stderr)
                continue
            self.options.append(f"{question.option}={answer}")
            return answer


@contextmanager
def answers() -> Iterator[Interview]:
    """When the command fails or is interrupted, print how to go on with the answers that it has."""
    asked = Interview()
    try:
        yield asked
    except (UserError, typer.Abort, KeyboardInterrupt):
        if asked.options:
            command = shlex.join(["hyperpod-ft", *sys.argv[1:], *asked.options])
            print(f"\nTo continue with these answers: {command}", file=sys.stderr)
        raise
