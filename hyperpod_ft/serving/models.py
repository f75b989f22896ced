"""Which models a command means: those of a run side by side, or a directory, and adapters by name."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hyperpod_ft.checkpoint import kinds
from hyperpod_ft.checkpoint.adapters import origin
from hyperpod_ft.checkpoint.formats.model_directory import is_classifier, read_config
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.finished import BASE, TUNED, outside_runs, tuned_run
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.snapshot import code_for
from hyperpod_ft.runs.run import Run

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ADAPTER_EXAMPLE = "e.g. --adapter mine=out/adapter"


@dataclass(frozen=True)
class Models:
    """Model directories by name, the default first; `adapters` by name belong to the last of them.

    `tokenizer`: where tokenizer and chat template are; all models of a run are asked as the tuned one was taught.
    `run`: the run that made the models; None for a directory.
    """

    title: str
    directories: dict[str, Path]
    adapters: dict[str, Path]
    tokenizer: Path
    run: Run | None = None

    @property
    def python(self) -> Path:
        """The interpreter that has torch: that of the run, or this one.

        Training jobs make their environment in their containers: then there may be none here. That of `env.container`
        works only in it.
        """
        run = self.run
        if (
            run is None
            or run.config.env.container
            or (run.config.has_other_interpreters and not run.paths.python.exists())
        ):
            return Path(sys.executable)
        return run.paths.python


def find(reference: str | None, launchers: Launchers, adapters: Sequence[str] = (), *, base: bool = True) -> Models:
    """The models of a RUN or DIR argument; None is the run submitted last. `base`: also the base model of a run.

    `adapters`: NAME=DIR. What only the run's store has is pulled. Raises UserError when there is no such run or
    directory, or no tuned model yet.
    """
    named = dict(_adapter(text) for text in adapters)
    if directory := outside_runs(reference):
        kinds.expect("", directory, "model")
        name = directory.resolve().name
        return _checked(Models(name, {name: directory}, named, directory))
    # the adapter is small, and what vLLM adds to the base model
    run = tuned_run(reference, launchers, base=base or bool(named))
    directories = {TUNED: run.paths.tuned_model}
    if base or named:
        kinds.expect("base model", run.paths.base_model, "model")
        directories[BASE] = run.paths.base_model
    return _checked(Models(run.paths.full_name, directories, named, run.paths.tuned_model, run))


def name_and_directory(text: str) -> tuple[str, Path]:
    """The two parts of NAME=DIR. Raises ValueError."""
    name, _, directory = text.partition("=")
    if not name or not directory:
        raise ValueError(f"{text!r} is not NAME=DIR")
    return name, Path(directory)


def _adapter(text: str) -> tuple[str, Path]:
    try:
        name, directory = name_and_directory(text)
    except ValueError as error:
        raise UserError(f"--adapter: {error}", _ADAPTER_EXAMPLE) from error
    if not _NAME.fullmatch(name):
        raise UserError(
            f"--adapter {text}: a name has at most 64 letters, digits, dots, underscores and hyphens", _ADAPTER_EXAMPLE
        )
    kinds.expect(f"--adapter {name}", directory, "adapter")
    return name, directory


def _checked(models: Models) -> Models:
    if both := sorted(models.directories.keys() & models.adapters.keys()):
        raise UserError(f"--adapter {both[0]}: a model already has this name", "choose another")
    for directory in models.directories.values():
        if is_classifier(read_config(directory)):
            raise UserError(
                f"{directory}: is a reward model, which writes no answers",
                "load it with transformers' AutoModelForSequenceClassification",
            )
    for directory in models.adapters.values():
        origin.check_base([*models.directories.values()][-1], directory)
    return models


def options(models: Models, more: Sequence[str]) -> list[str]:
    """The arguments of `python -m hyperpod_ft.serving` for these models, with absolute paths, and `more`."""
    given = ["--title", models.title, "--tokenizer", str(models.tokenizer.absolute())]
    for name, directory in models.directories.items():
        given += ["--model", f"{name}={directory.absolute()}"]
    for name, directory in models.adapters.items():
        given += ["--adapter", f"{name}={directory.absolute()}"]
    return [*given, *more]


def environment(models: Models) -> dict[str, str]:
    """What a server needs besides this process's environment, as `code_for` says."""
    # models are directories: nothing is fetched
    variables = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return variables | (code_for(models.python, models.run.paths.code_copies) if models.run else {})


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
