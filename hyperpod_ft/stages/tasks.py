"""Stage `tasks`: prepare the evaluation: lm-evaluation-harness, its tasks' datasets, and a copy of the user's tasks.

    python -m hyperpod_ft.stages.tasks RUN_DIR

Runs with the kit's own interpreter, before the training, so that an unknown task is found early. It uses the network;
stage `eval` does not.
"""

import filecmp
import re
import shutil
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.config import sources
from hyperpod_ft.config.sections.results import Eval
from hyperpod_ft.digests import files_below
from hyperpod_ft.environments.installation import build_on_top_of
from hyperpod_ft.environments.interpreters import probe
from hyperpod_ft.errors import ConfigError, UserError
from hyperpod_ft.evaluation import harness_process
from hyperpod_ft.evaluation.harness import TasksRequest
from hyperpod_ft.planning.pins import EVALUATION_ENVIRONMENT, pins_file, requirements
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages.stage import Result, main

# Imported by the kit's own code, and what the harness needs to run models.
_IMPORTS = ("pydantic", "yaml", "lm_eval")
_PACKAGES = ("torch", "transformers", "accelerate")

_REMEDY = "install lm_eval[hf] and hyperpod-ft there, or remove eval.python"


def work(run: Run) -> Result:
    section = run.config.eval
    assert section is not None, "a run with this stage has the section"
    outputs = []
    if section.python is None:
        _create_environment(run.paths.python, run.paths.evaluation_environment)
        outputs.append(run.paths.evaluation_environment / "pyvenv.cfg")
    found = probe(run.paths.evaluation_python, _IMPORTS, _REMEDY)
    packages = found["packages"]
    if missing := [name for name in _PACKAGES if name not in packages]:
        raise UserError(f"eval.python: {run.paths.evaluation_python} has no {', '.join(missing)}", _REMEDY)
    version = str(packages.get("lm_eval", packages.get("lm-eval", "none")))
    _check_version(version)
    print(f"tasks: {run.paths.evaluation_python}, lm-evaluation-harness {version}", flush=True)
    if run.paths.own_tasks:
        _copy_own_tasks(section, run.paths.own_tasks)
        outputs.append(run.paths.own_tasks)
    include = str(run.paths.own_tasks) if run.paths.own_tasks else None
    answer = harness_process.look_up(run.paths, TasksRequest(section.tasks, include, section.allow_code_execution))
    if answer.problems:
        raise ConfigError([f"eval.tasks: {name}: {problem}" for name, problem in answer.problems.items()])
    for name, members in answer.found.items():
        print(f"tasks: {name}" + (f": {len(members)} tasks" if members != (name,) else ""), flush=True)
    return Result(outputs, {"interpreter": str(run.paths.evaluation_python), **found, "tasks": answer.found})


def _create_environment(base: Path, environment: Path) -> None:
    """On top of the run's, whose torch both models run on, unless another run has created it."""
    with publish.lock(environment.with_suffix(".lock"), "tasks: another run is installing the harness; waiting for it"):
        if not (environment / "pyvenv.cfg").exists():
            build_on_top_of(base, pins_file(EVALUATION_ENVIRONMENT), environment)


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
    source = Path(section.include_path)
    with publish.lock(copy.with_suffix(".lock")):
        # a harness of another run may be working in it
        if not _is_copied(source, copy):
            with publish.new_directory(copy) as partial:
                shutil.copytree(source, partial, dirs_exist_ok=True)


def _is_copied(source: Path, copy: Path) -> bool:
    pairs = ((file, copy / file.relative_to(source)) for file in files_below(source))
    return all(there.is_file() and filecmp.cmp(file, there, shallow=False) for file, there in pairs)


if __name__ == "__main__":
    main("tasks", work)
