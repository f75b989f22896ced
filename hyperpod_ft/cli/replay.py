"""The command `replay`: a step of a run again."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from hyperpod_ft.cli.options import RunReference
from hyperpod_ft.errors import UserError


def replay(
    reference: RunReference = None,
    *,
    step: Annotated[int, typer.Option("--step", metavar="N", min=1, help="A step that metrics.jsonl has.")],
) -> None:
    """Compute a step of the training again (engine torch): are the recorded figures those that it gives?

    From the newest checkpoint before it, with the same rows, by one process on this machine: on a GPU if the run used
    GPUs and one is here, otherwise on CPUs. Compares loss, gradient norm, learning rate, and the weights if a
    checkpoint was kept after the step. Writes nothing to the run. Exit code 3 if a figure differs by more than printed.
    """
    from hyperpod_ft.config.secrets import parted
    from hyperpod_ft.launch import container
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.launch.slurm.client import step as on_one_node
    from hyperpod_ft.launch.slurm.launcher import job_options, slurm_of
    from hyperpod_ft.launch.snapshot import code_for
    from hyperpod_ft.runs import references
    from hyperpod_ft.runs.jobs import job_python

    run = references.find(reference)
    Launchers().bring_small_files(run)
    run.journal.require_done("env", "there is no interpreter for its steps")
    directory, python = run.paths.directory.absolute(), job_python(run.paths).absolute()
    # in the run's container, if it has one, on a node of its training
    inside = list[str]()
    if run.config.env.container:
        job = [] if "SLURM_JOB_ID" in os.environ else job_options(run)
        inside = on_one_node([*job, "--cpu-bind=none", *container.checked(run.config, run.paths, "replay")])
    # nothing of the working directory, and no secret: a run file names the interpreter
    environment = parted(os.environ).open | code_for(Path() if inside else python, run.paths.code_copies)
    environment |= slurm_of(run).environment if inside else {}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONNOUSERSITE": "1", "PYTHONSAFEPATH": "1"}
    if not run.config.instance.has_accelerators:
        environment["OMP_NUM_THREADS"] = "1"  # as its jobs had: more threads add in another order
    sys.stdout.flush()
    os.chdir("/")
    try:
        command = [*inside, str(python), "-m", "hyperpod_ft.replay", str(directory), str(step)]
        os.execvpe(command[0], command, environment)  # noqa: S606
    except OSError as error:
        problem = f"{python}: cannot run this interpreter: {error.strerror}"
        raise UserError(problem, "run the env stage, or correct env.python") from error
