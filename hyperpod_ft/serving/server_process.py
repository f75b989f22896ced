"""The server on this machine: its arguments and environment, and how this process becomes it."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.snapshot import hold, snapshot
from hyperpod_ft.runs import volume_lock
from hyperpod_ft.serving.models import Models


def options(models: Models, more: Sequence[str]) -> list[str]:
    """The arguments of `python -m hyperpod_ft.serving` for these models, with absolute paths, and `more`."""
    given = ["--title", models.title, "--tokenizer", str(models.tokenizer.absolute())]
    for name, directory in models.directories.items():
        given += ["--model", f"{name}={directory.absolute()}"]
    for name, directory in models.adapters.items():
        given += ["--adapter", f"{name}={directory.absolute()}"]
    return [*given, *more]


def environment(models: Models) -> dict[str, str]:
    """What a server needs besides this process's environment.

    Where it names a copy of the kit's code, `clean` keeps that copy until this process, and what it becomes, has ended.
    """
    # models are directories: nothing is fetched
    variables = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if models.run and models.python != Path(sys.executable):
        # that interpreter may lack the kit, or have another version
        with volume_lock.submitting(models.run.root):  # `clean` must not remove the copy before it is held
            copy = snapshot(models.run.code_copies)
            hold(copy)
        variables["PYTHONPATH"] = str(copy)
    return variables


def exec_server(models: Models, more: Sequence[str]) -> NoReturn:
    """Replace this process by the server, or its single answer, with the interpreter that has torch.

    Raises UserError when that interpreter is missing.
    """
    command = [str(models.python), "-m", "hyperpod_ft.serving", *options(models, more)]
    variables = {**os.environ, **environment(models)}
    sys.stdout.flush()
    try:
        os.execve(command[0], command, variables)  # noqa: S606
    except OSError as error:
        raise UserError(
            f"{command[0]}: cannot run this interpreter: {error.strerror}",
            "run the env stage, or correct env.python",
        ) from error
