"""Which models a command means: those of a run side by side, or a directory, and adapters by name."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ft.checkpoint import kinds
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs import references
from hyperpod_ft.runs.run import Run
from hyperpod_ft.serving import stored_models

TUNED, BASE = "tuned", "base"
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

        Training jobs make their environment in their containers: then there may be none here.
        """
        run, own = self.run, Path(sys.executable)
        return own if run is None or (run.config.sagemaker and not run.python.exists()) else run.python


def find(reference: str | None, adapters: Sequence[str] = (), *, base: bool = True) -> Models:
    """The models of a RUN or DIR argument; None is the run submitted last. `base`: also the base model of a run.

    `adapters`: NAME=DIR. What only the run's store has is pulled. Raises UserError when there is no such run or
    directory, or no tuned model yet.
    """
    named = dict(_adapter(text) for text in adapters)
    if reference is not None and Path(reference).is_dir() and not (Path(reference) / "run.yaml").exists():
        directory = Path(reference)
        kinds.expect("", directory, "model")
        name = directory.resolve().name
        return _checked(Models(name, {name: directory}, named, directory))
    run = references.find(reference)
    stored_models.refresh(run)
    run.require_done(run.plan.model_stage, "no tuned model yet")
    # the adapter is small, and what vLLM adds to the base model
    stored_models.pull(run, [run.tuned_model, *([run.base_model, run.adapter] if base or named else [])])
    directories = {TUNED: run.tuned_model}
    if base or named:
        kinds.expect("base model", run.base_model, "model")
        directories[BASE] = run.base_model
    return _checked(Models(run.full_name, directories, named, run.tuned_model, run))


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
    return models
