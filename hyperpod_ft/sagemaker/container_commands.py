"""What a training job's container does around its stages, with the kit's interpreter:

    python -m hyperpod_ft.sagemaker.container_commands COMMAND ARGUMENTS...

    pull-run RUN_DIR ROOT STORE DIGEST  what `submit` has pushed of the run
    refuse-cancelled RUN_DIR JOB    fail if this job was cancelled
    is-done RUN_DIR STAGE           exit status 0 if the stage has its record
    before RUN_DIR STAGE [STEP]     with a store: pull what the stage needs, and the newest checkpoint, or that of STEP
    before-attempt RUN_DIR STAGE    the same; prints {"checkpoint": its step}
    during RUN_DIR STAGE HOST HOSTS with a store: push what it has finished, until stdin ends
    after RUN_DIR STAGE             with a store: push its outputs, and then its record
    state RUN_DIR                   with a store: push metrics, attempts, exit statuses
    used RUN_DIR JOB                print how many seconds of its limit this job has used
    advance RUN_DIR JOB             create the run's next training job; JOB is this one

A user's error is one line and exit status 2, as in every program of the kit.
"""

import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from hyperpod_ft import publish
from hyperpod_ft.aws.s3 import trees
from hyperpod_ft.aws.session import Session, explained
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import EXIT_USER_ERROR, UserError, print_error
from hyperpod_ft.job import neuron_cache
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import RunPaths
from hyperpod_ft.sagemaker import advance
from hyperpod_ft.sagemaker.groups import FROZEN, number_of, run_files_digest
from hyperpod_ft.sagemaker.section import sagemaker_section, store_of
from hyperpod_ft.sagemaker.store.run_store import RunStore
from hyperpod_ft.sagemaker.store.sync import sync_of
from hyperpod_ft.sagemaker.training_jobs import TrainingJobs

_POLL_SECONDS = 1.0
_STATE_SECONDS = 30.0


def pull_run(directory: Path, root: Path, store: str, digest: str) -> None:
    """Pull the run's plan, scripts and records, of which this machine has nothing yet.

    Raises UserError unless plan and scripts are those that the job was created with.
    """
    name = directory.relative_to(root).as_posix()
    with explained(f"cannot read {store}"):
        client = Session(os.environ.get("AWS_REGION")).client("s3")
        trees.pull_named(client, store, root, [f"{name}/{frozen}" for frozen in FROZEN], "pull run", flush=False)
        trees.pull(client, store, root, f"{name}/sbatch", "pull run", flush=False)
        if run_files_digest(directory) != digest:
            publish.remove(directory)  # nothing may follow what they say
            raise UserError(
                f"{store}/{name}: run.yaml, plan.json or sbatch are not those of the machine that created this job",
                "somebody has changed them; submit the run again",
            )
        _store(Run.open(directory)).pull_records()


def answer_is_done(run: Run, stage: str) -> NoReturn:
    """Exit with status 0 if the stage is done, otherwise 1."""
    sys.exit(int(not run.journal.is_done(stage)))


def before(run: Run, stage: str, step: int | None = None) -> int | None:
    """Pull the outputs of the stages that it needs, and what an earlier job of the stage has pushed.

    `step`: of the checkpoint that the first host has, 0 if it has none; None for the newest. Returns the step of the
    checkpoint that is here.
    """
    with _explained(run.config):
        store = _store(run)
        store.pull_needs(stage)
        if stage == "train" and (checkpoint := store.pull_checkpoint(step)):
            return number_of(checkpoint.name)
        if stage == "precompile":
            store.pull_graphs()
    return None


def before_attempt(run: Run, stage: str) -> None:
    """As `before`, and print the checkpoint's step for the other hosts."""
    print(json.dumps({"checkpoint": before(run, stage)}), flush=True)


def during(run: Run, stage: str, host: int, hosts: int) -> None:
    """Push checkpoints as they are published, shards and compiled graphs as they are finished, and small files.

    Ends when its standard input does, after a last look. What cannot be pushed now is tried again.
    """
    store, done, graphs = _store(run), set[tuple[Path, int]](), set[str]()
    pushed_state, at_end = 0.0, False
    while True:
        try:
            with _explained(run.config):
                if stage == "train":
                    _push_checkpoints(run.paths, store, host, hosts, done)
                elif stage == "precompile":
                    push_graphs(run.paths, store, graphs)
                elif stage in ("consolidate", "merge"):
                    store.push_finished(run.paths.tuned_model, f"push {stage}")
                if not host and (at_end or time.monotonic() - pushed_state > _STATE_SECONDS):
                    store.push_state()
                    pushed_state = time.monotonic()
        except Exception as error:  # of any kind, such as a full disk: the training may still have hours to go
            print_error(stage, str(error) if isinstance(error, UserError) else repr(error))
            if at_end:
                raise
        if at_end:
            return
        at_end = bool(select.select([sys.stdin], [], [], _POLL_SECONDS)[0])


def _push_checkpoints(paths: RunPaths, store: RunStore, host: int, hosts: int, done: set[tuple[Path, int]]) -> None:
    """Push the checkpoints published since the last call; `done` holds their paths and times."""
    for directory in [paths.best_checkpoint, *paths.checkpoints_by_step().values()]:
        with contextlib.suppress(FileNotFoundError):  # not there, or just removed
            found = directory, directory.stat().st_mtime_ns
            if found not in done:
                store.push_checkpoint(directory, host, hosts)
                done.add(found)


def push_graphs(paths: RunPaths, store: RunStore, done: set[str]) -> None:
    """Push the graphs finished since the last call; `done` holds their names."""
    if found := neuron_cache.finished(paths.neuron_cache) - done:
        store.push_graphs([paths.neuron_cache / name for name in sorted(found)])
        done |= found


def push_state(run: Run) -> None:
    """Push the run's small files."""
    with _explained(run.config):
        _store(run).push_state()


def after(run: Run, stage: str) -> None:
    """Push the outputs and the record of a stage that is done."""
    with _explained(run.config):
        _store(run).push_state()
        _store(run).push_stage(stage)


def print_seconds_used(run: Run, job: str) -> None:
    """Print how many seconds of its limit this job has used, in earlier containers too."""
    print(TrainingJobs(sagemaker_section(run.config).region).seconds_used(job), flush=True)


def refuse_cancelled(run: Run, job: str) -> None:
    """Raise UserError when the job was cancelled before it began."""
    if advance.is_cancelled(run, job):
        raise UserError(f"{job}: was cancelled", f"hyperpod-ft resume {run.paths.directory}")


def create_next(run: Run, job: str) -> None:
    """Create the training job that follows this one, if one does."""
    if run.config.sagemaker is None:
        return
    jobs = TrainingJobs(sagemaker_section(run.config).region)
    if name := advance.advance(run, jobs, sync_of(run, jobs.session), leaving=job):
        print(f"advance: created training job {name}", flush=True)


def _store(run: Run) -> RunStore:
    return RunStore(run, Session(sagemaker_section(run.config).region).client("s3"))


def _explained(config: RunConfig) -> contextlib.AbstractContextManager[None]:
    return explained(f"store {store_of(config)}")


# with a run, a stage and numbers; the log names the stage when they fail
_STAGE_COMMANDS: dict[str, Callable[..., object]] = {
    "is-done": answer_is_done,
    "before": before,
    "before-attempt": before_attempt,
    "during": during,
    "after": after,
}
# with a run, and strings; the log names the command
_RUN_COMMANDS: dict[str, Callable[..., object]] = {
    "state": push_state,
    "refuse-cancelled": refuse_cancelled,
    "used": print_seconds_used,
    "advance": create_next,
}


def main() -> int:
    """Run the command line; returns the exit status."""
    command, directory, *arguments = sys.argv[1:]
    # S3 may ask clients to slow down for minutes: no user is waiting, and giving up would lose the stage's work
    os.environ.setdefault("AWS_MAX_ATTEMPTS", "10")
    try:
        if command == "pull-run":  # there is no run to open yet
            pull_run(Path(directory), Path(arguments[0]), *arguments[1:])
        elif command in _STAGE_COMMANDS:
            stage, *numbers = arguments
            _STAGE_COMMANDS[command](Run.open(Path(directory)), stage, *map(int, numbers))
        else:
            _RUN_COMMANDS[command](Run.open(Path(directory)), *arguments)
    except UserError as error:
        print_error(arguments[0] if command in _STAGE_COMMANDS else command, str(error))
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
