"""Submit a run: choose the stages that must run, write the run directory, hand the chain to a launcher."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.config import run_file
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch import provenance
from hyperpod_ft.launch.chain import ChainParts, divide
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.preflight import check_run
from hyperpod_ft.launch.protocol import NOTHING_ELSE, AwaitedJobs, Launcher
from hyperpod_ft.launch.render import Installation, render
from hyperpod_ft.launch.snapshot import snapshot
from hyperpod_ft.planning.plan import StagePlan, plan
from hyperpod_ft.runs import volume_lock
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import Selection, choose


def submit(run: Run, launchers: Launchers, selection: Selection, launcher_name: str = "slurm") -> tuple[Job, ...]:
    """Submit the stages that must run, with the launcher of that name; returns the jobs, none when all is done.

    Raises UserError when jobs of this run are still active, when the launcher refuses them, or when this version would
    plan the run differently.
    """
    launcher = launchers.named(launcher_name)
    _refuse_another_version(run)
    with _exclusive_submission(run, launchers, also=launcher_name) as active:
        _refuse_active_jobs(run, active)
        _use_this_volume(run, launcher)
        stages = choose(run, selection)
        with _discard_earlier(run, stages if selection.force else ()):
            return _submit(run, launcher, stages)


def submit_missing(run: Run, launchers: Launchers, launcher_name: str, awaited: AwaitedJobs) -> tuple[Job, ...]:
    """Submit those stages that must run and that no job is about to do, of this run or of another.

    `awaited`: the jobs of other runs. Completes what a killed submission has left: its jobs are kept, and later ones
    wait for them. Jobs that can never start, because what they wait for has failed, are replaced. Returns the new jobs.
    Raises UserError as `submit` does.
    """
    launcher = launchers.named(launcher_name)
    _refuse_another_version(run)
    with _exclusive_submission(run, launchers, also=launcher_name) as active:
        if not active:
            _use_this_volume(run, launcher)
        elif any(job.launcher != launcher_name for job in active):
            return ()  # jobs of one launcher cannot wait for those of another
        parts = _divide(run, launchers, active, awaited)
        if parts.never_start:
            launchers.cancel(run, parts.never_start)
            left = [job for job in launchers.active(run) if job not in parts.never_start]
            parts = _divide(run, launchers, left, awaited)
        return _submit(run, launcher, parts.missing, parts.awaited)


def _divide(run: Run, launchers: Launchers, active: Sequence[Job], awaited: AwaitedJobs) -> ChainParts:
    states = launchers.states(run, active)
    pending = [job for job in active if job.job_id in states and states[job.job_id].state == "PENDING"]
    return divide(run, choose(run), active, pending, awaited)


def _submit(
    run: Run, launcher: Launcher, stages: Sequence[StagePlan], awaited: AwaitedJobs = NOTHING_ELSE
) -> tuple[Job, ...]:
    if not stages:
        return ()
    _prepare(run)
    earlier = len(run.jobs())
    launcher.submit(run, stages, run.add_job, awaited)
    return tuple(run.jobs()[earlier:])


def _refuse_another_version(run: Run) -> None:
    if run.plan != plan(run.config):
        raise UserError(
            f"{run.directory}: was planned by another version of hyperpod-ft",
            "continue with that version, or start a new run that shares what it can: "
            f"hyperpod-ft submit {run.config_path}",
        )


def _use_this_volume(run: Run, launcher: Launcher) -> None:
    """Forget what only containers and the store have, unless training jobs will do the work."""
    if launcher.shares_environment:
        _forget_environment_of_a_container(run)
        # its jobs need the outputs on their own volume, not in a store
        publish.remove(run.store_listing)


def _forget_environment_of_a_container(run: Run) -> None:
    """A record of stage env without outputs is about an environment that was not on the volume."""
    record = run.record("env")
    if record is not None and not record.outputs and run.config.env.python is None:
        publish.remove(run.record_path("env"))


def prepare(run: Run, launchers: Launchers) -> list[Path]:
    """Write the run directory, ready for `sbatch`; returns the scripts in order.

    Raises UserError when jobs of the run are still active: they read the files that this writes.
    """
    with _exclusive_submission(run, launchers) as active:
        _refuse_active_jobs(run, active)
        return _prepare(run)


def cancel(run: Run, launchers: Launchers) -> tuple[Job, ...]:
    """Stop the run's jobs, whichever launcher has them, and record that it was on purpose."""
    jobs = launchers.active_or_by_hand(run)
    launchers.cancel(run, jobs)
    for job in jobs:
        publish.write_text(run.cancel_marker(job.stage, job.job_id), "")
    return tuple(jobs)


@contextlib.contextmanager
def _exclusive_submission(run: Run, launchers: Launchers, also: str = "") -> Iterator[list[Job]]:
    """Exclude other submissions; yield the run's active jobs.

    Freezes a new run before anything can fail, so that every command can read the directory that an error names.
    """
    create_run_directory(run)
    _refuse_second_root(run)
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(volume_lock.submitting(run.root))]
        create_run_directory(run)  # a removal that this has waited for may have taken it, with a lock in it
        held.append(
            stack.enter_context(
                publish.lock(run.directory / "submit.lock", waiting="waiting for another submission of this run")
            )
        )
        for descriptor in held:  # sbatch holds the locks too, which outlives a submission that is killed
            os.set_inheritable(descriptor, True)
        yield launchers.at_work(run, also)


def _refuse_active_jobs(run: Run, active: Sequence[Job]) -> None:
    if active:
        jobs = ", ".join(f"{job.stage} {job.job_id}" for job in active)
        raise UserError(f"{run.directory}: still at work: {jobs}", f"wait, or: hyperpod-ft cancel {run.directory}")


def _prepare(run: Run) -> list[Path]:
    check_run(run)
    installation = Installation(Path(sys.executable), snapshot(run.code_copies))
    run.freeze()
    scripts = render(run, installation)
    for stage, text in scripts.items():
        publish.write_text(run.script(stage), text)
    timestamp = _timestamp()
    run.add_submission(provenance.submission(installation), timestamp)
    publish.write_text(run.provenance / f"run-{timestamp}.yaml", run.yaml())
    return [run.script(stage) for stage in scripts]


def create_run_directory(run: Run) -> None:
    """Make the directory of a new run, readable for every command. Raises UserError when that is not possible."""
    try:
        if not run.config_path.exists():
            run.freeze()
        run.logs.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cluster.root: cannot create {run.directory}: {error.strerror}",
            "set it to a directory on the shared volume that you may write to",
        ) from error


def _refuse_second_root(run: Run) -> None:
    """Jobs are recognized by the path of their run directory, and find the run by it: a volume has one name."""
    try:
        root = run_file.open_frozen(run.config_path).root
    except UserError:  # of another version, or damaged: it is rewritten
        return
    frozen = root / run.relative(run.config_path)
    if root != run.root and frozen.exists() and frozen.samefile(run.config_path):
        raise UserError(
            f"cluster.root: {run.root}: this run was submitted below {root}, the same directory",
            f"set cluster.root to {root}",
        )


@contextlib.contextmanager
def _discard_earlier(run: Run, stages: Sequence[StagePlan]) -> Iterator[None]:
    """Remove the records of these stages; put them back when the block fails.

    A training run that is forced must not resume from its checkpoints, nor an evaluation from its scores: they are kept
    under another name, but for those of the base model, which the stage discards.
    """
    moved: list[tuple[Path, Path]] = []
    records = [run.record_path(stage.name) for stage in stages]
    training = any(stage.name == "train" for stage in stages)
    of_training = [
        run.checkpoints,
        run.metrics_path,
        run.usage_path,
        run.restarts_path("train"),
        run.reference_log_probabilities,
        run.tracking,  # in trackers, it is another run
    ]
    discarded = [*records, *(of_training if training else [])]
    forces_evaluation = any(stage.name == "eval" for stage in stages)
    if forces_evaluation:
        discarded.append(run.tuned_scores)
        # runs share the base model's, and only the stage knows the conditions of its own
        publish.write_text(run.evaluation_forced, "")
    timestamp = _timestamp()
    try:
        for path in discarded:
            if path.exists():
                aside = path.with_name(f"{path.name}.discarded-{timestamp}")
                path.rename(aside)
                moved.append((path, aside))
        yield
    except BaseException:
        for path, aside in moved:
            aside.rename(path)
        if forces_evaluation:
            run.evaluation_forced.unlink(missing_ok=True)
        raise
    for path, aside in moved:
        if path in records:
            aside.unlink()


def _timestamp() -> str:
    """A part of a file name: this second and this process."""
    return f"{utc_now().replace(':', '')}-{os.getpid()}"
