"""The command line and environment of a server, and how this process becomes it."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.snapshot import hold, snapshot
from hyperpod_ft.runs import volume_lock
from hyperpod_ft.serving.models import Models


@dataclass(frozen=True)
class Program:
    """`environment` is laid over this process's own."""

    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    def become(self) -> NoReturn:
        """Replace this process. Raises UserError when the interpreter is missing."""
        sys.stdout.flush()
        try:
            os.execve(self.command[0], self.command, {**os.environ, **self.environment})  # noqa: S606
        except OSError as error:
            raise UserError(
                f"{self.command[0]}: cannot run this interpreter: {error.strerror}",
                "run the env stage, or correct env.python",
            ) from error


def options(models: Models, more: Sequence[str]) -> list[str]:
    """The arguments of `python -m hyperpod_ft.serving` for these models, with absolute paths, and `more`."""
    given = ["--title", models.title, "--tokenizer", str(models.tokenizer.absolute())]
    for name, directory in models.directories.items():
        given += ["--model", f"{name}={directory.absolute()}"]
    for name, directory in models.adapters.items():
        given += ["--adapter", f"{name}={directory.absolute()}"]
    return [*given, *more]


def server(models: Models, more: Sequence[str]) -> Program:
    """The server on this machine, or its single answer, with the interpreter that has torch."""
    # models are directories: nothing is fetched
    environment = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if models.run and models.python != Path(sys.executable):
        # that interpreter may lack the kit, or have another version
        with volume_lock.submitting(models.run.root):  # `clean` must not remove the copy before it is held
            copy = snapshot(models.run.code_copies)
            hold(copy)
        environment["PYTHONPATH"] = str(copy)
    return Program((str(models.python), "-m", "hyperpod_ft.serving", *options(models, more)), environment)
