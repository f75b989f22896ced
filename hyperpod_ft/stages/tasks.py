"""Stage `tasks`: prepare the evaluation: lm-evaluation-harness, its tasks' datasets, and a copy of the user's tasks.

    python -m hyperpod_ft.stages.tasks RUN_DIR

Runs with the kit's own interpreter, before the training, so that an unknown task is found early. It uses the network;
stage `eval` does not.
"""

import re
import shutil
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.config import sources
from hyperpod_ft.config.sections.evaluation import Eval
from hyperpod_ft.errors import ConfigError, UserError
from hyperpod_ft.evaluation import harness_process
from hyperpod_ft.evaluation.harness import TasksRequest
from hyperpod_ft.job import interpreters
from hyperpod_ft.job.installation import install
from hyperpod_ft.planning.pins import EVALUATION_ENVIRONMENT, pins_file, requirements
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages.env import probe
from hyperpod_ft.stages.stage import Result, main

_IMPORTS = ("torch", "transformers", "accelerate", "datasets", "pydantic", "yaml", "lm_eval")


def work(run: Run) -> Result:
    section = run.config.eval
    assert section is not None, "a run with this stage has the section"
    outputs = []
    if section.python is None:
        _build(run.python, run.evaluation_environment)
        outputs.append(run.evaluation_environment / "pyvenv.cfg")
    found = probe(run.evaluation_python, _IMPORTS, "install lm_eval[hf] there, or remove eval.python")
    version = str(found["packages"].get("lm_eval", found["packages"].get("lm-eval", "none")))
    _check_version(version)
    print(f"tasks: {run.evaluation_python}, lm-evaluation-harness {version}", flush=True)
    if run.own_tasks:
        _copy_own_tasks(section, run.own_tasks)
        outputs.append(run.own_tasks)
    include = str(run.own_tasks) if run.own_tasks else None
    answer = harness_process.look_up(run, TasksRequest(section.tasks, include, section.allow_code_execution))
    if answer.problems:
        raise ConfigError([f"eval.tasks: {name}: {problem}" for name, problem in answer.problems.items()])
    for name, members in answer.found.items():
        print(f"tasks: {name}" + (f": {len(members)} tasks" if members != (name,) else ""), flush=True)
    return Result(outputs, {"interpreter": str(run.evaluation_python), **found, "tasks": answer.found})


def _build(base: Path, environment: Path) -> None:
    """Create the environment on top of the run's, unless another run has: its torch is what both models run on."""
    with publish.lock(environment.with_suffix(".lock"), "tasks: another run is installing the harness; waiting for it"):
        if (environment / "pyvenv.cfg").exists():
            return
        pins = pins_file(EVALUATION_ENVIRONMENT)
        print(f"tasks: installing {pins.name} into {environment}; this takes a few minutes", flush=True)
        with publish.new_directory(environment) as partial:
            interpreters.create_on_top_of(base, partial)
            install(partial / "bin" / "python", pins)
            interpreters.move_scripts(partial, environment)


def _check_version(version: str) -> None:
    """Refuse a harness that the kit does not know. Raises UserError."""
    known = next(pin.partition("==")[2] for pin in requirements(EVALUATION_ENVIRONMENT) if pin.startswith("lm-eval=="))
    numbers = [[int(part) for part in re.findall(r"\d+", text)[:3]] for text in (version, known)]
    if numbers[0] < numbers[1] or numbers[0][:2] != numbers[1][:2]:
        raise UserError(
            f"eval.python: has lm-evaluation-harness {version}, and this kit needs {known} or a later {known[:3]}",
            f"install lm_eval=={known} there, or remove eval.python",
        )


def _copy_own_tasks(section: Eval, copy: Path) -> None:
    """Copy the user's tasks to the volume. Raises UserError when they have changed since the run was submitted."""
    assert section.include_path is not None
    key = "eval.include_path"
    sources.resolve_path(key, section.include_path, key, section.include_revision, Path("/"))
    with publish.lock(copy.with_suffix(".lock")), publish.new_directory(copy) as partial:
        shutil.copytree(section.include_path, partial, dirs_exist_ok=True)


if __name__ == "__main__":
    main("tasks", work)
