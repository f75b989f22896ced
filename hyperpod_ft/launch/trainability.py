"""Whether a run's model can be trained and consolidated, before anything is trained: asked as soon as it can be known.

The answer needs the model and transformers, which the head node's commands do not import: the run's interpreter gives
it in a short process. Where the model or that interpreter is still missing, stage certify asks.
"""

import contextlib
import functools
import os
import subprocess
import tempfile
from pathlib import Path

from hyperpod_ft.checkpoint.formats import model_directory
from hyperpod_ft.checkpoint.formats.model_directory import read_config
from hyperpod_ft.checkpoint.formats.safetensors_file import read_model
from hyperpod_ft.config.secrets import parted
from hyperpod_ft.errors import EXIT_USER_ERROR, UserError, last_line
from hyperpod_ft.planning.model_shape import ModelShape, model_shape
from hyperpod_ft.planning.t5_shape import t5_shape
from hyperpod_ft.progress import activity
from hyperpod_ft.runs.assets import config_directory, is_adapter_known
from hyperpod_ft.runs.jobs import job_python
from hyperpod_ft.runs.run import Run
from hyperpod_ft.shipped import PACKAGE

_PROGRAM = "hyperpod_ft.engines.torch.consolidable"
_SECONDS = 300.0  # it takes about five; without an answer, every rank still compares before the first step
# Matrices that are no modules of a shape: a T5's embedding under all its names, and its biases of positions.
_NOT_LINEAR = (
    model_directory.OUTPUT,
    model_directory.SHARED,
    *model_directory.SHARED_ALIASES,
    "relative_attention_bias.weight",
)


def check_trainable(run: Run) -> None:
    """Raise UserError when it is known that the model cannot be loaded, adapted or consolidated."""
    directory = config_directory(run.config)
    python = job_python(run.paths)
    if run.config.engine != "torch" or directory is None or run.config.env.container or not python.exists():
        return
    if not is_adapter_known(run.config):
        return
    config = read_config(directory)
    shape = model_shape(config) or t5_shape(config)
    if shape and _has_usual_names(shape, directory):
        return
    # only what decides, not the rank, for example: the points of a sweep ask the same
    lora = run.config.lora.model_dump_json(include={"target_modules", "target_parameters", "modules_to_save", "dora"})
    adapters = (lora,) if run.config.training.method == "lora" else ()
    if refusal := _refusal((str(python.absolute()), "-m", _PROGRAM, str(directory.absolute()), *adapters)):
        raise UserError(refusal)


@functools.cache
def _refusal(command: tuple[str, ...]) -> str:
    """What the program says against the model; empty when that is nothing, or the interpreter gives no answer."""
    with (
        contextlib.suppress(OSError, subprocess.TimeoutExpired),  # no interpreter, or a very slow volume
        activity("asking whether the model can be trained"),
        tempfile.TemporaryDirectory() as directory,
    ):
        # the package alone: next to it may be those of another Python
        Path(directory, PACKAGE.name).symlink_to(PACKAGE)
        # nothing of the working directory, and no secret: a run file names the interpreter
        environment = {**parted(os.environ).open, "PYTHONPATH": directory, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd="/", env=environment, timeout=_SECONDS
        )
        if done.returncode == EXIT_USER_ERROR:
            return last_line(done.stdout)
    return ""


def _has_usual_names(shape: ModelShape, directory: Path) -> bool:
    """Whether the matrices in the files are those of a family whose modules are known; needs no transformers."""
    try:
        stored = {tensor.name for tensor in read_model(directory) if len(tensor.shape) > 1}
    except UserError:  # only config.json is here yet, or the model is damaged, which stage download says
        return True
    linear = {f"{module}.weight" for module in shape.modules}
    return linear - {model_directory.OUTPUT} <= stored and all(name.endswith(_NOT_LINEAR) for name in stored - linear)
