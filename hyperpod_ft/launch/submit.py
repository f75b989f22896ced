"""Submit a run: have it decided what must run, write the run directory, hand the chain to a launcher."""

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.config import run_file, yaml_text
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.decision import DecidedSubmission, decide
from hyperpod_ft.launch.interface import Dependency, Launcher
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.preflight import check_run
from hyperpod_ft.launch.render import Installation, render
from hyperpod_ft.launch.snapshot import snapshot
from hyperpod_ft.planning.plan import plan
from hyperpod_ft.runs import volume_lock
from hyperpod_ft.runs.jobs import Job, Submission
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import RunPaths
from hyperpod_ft.runs.selection import Selection, choose


def submit(
    run: Run,
    launchers: Launchers,
    selection: Selection,
    launcher_name: str = "slurm",
    copy_sources: Callable[[Run], object] | None = None,
) -> tuple[Job, ...]:
    """Submit the stages that must run, with the launcher of that name; returns the jobs, none when all is done.

    `copy_sources` is called with the run before stage download is submitted where jobs do not see this machine's files,
    once the run is checked.
    Raises UserError when jobs of this run are still active, when the launcher refuses them, or when this version would
    plan the run differently; TrainsAgainError when it would train again without having been asked to.
    """
    launcher = _launcher_for(run, launchers, launcher_name)
    _check_before_writing(run, selection)
    with _alone(run):
        _refuse_active_jobs(run.paths, launchers.at_work(run, launcher_name))
        if launcher.shares_volume:
            _use_this_volume(run)
        return _carry_out(decide(run, selection), run, launcher, copy_sources)


def submit_missing(
    run: Run,
    launchers: Launchers,
    launcher_name: str,
    others: Mapping[str, Dependency],
    before_ranks: Sequence[Dependency],
) -> tuple[Job, ...]:
    """Submit those stages that must run and that no job is about to do, of this run or of another.

    `others`: by stage, jobs of other runs that are about to do it; `before_ranks`: what else must have ended before a
    stage begins that starts ranks. Completes what a killed submission has left: its jobs are kept, and later ones wait
    for them. Returns the new jobs. Raises UserError as `submit` does.
    """
    launcher = _launcher_for(run, launchers, launcher_name)
    everything = Selection()
    _check_before_writing(run, everything)
    with _alone(run):
        active = launchers.at_work(run, launcher_name)
        if not active:
            _use_this_volume(run)
        elif any(job.launcher != launcher_name for job in active):
            return ()  # jobs of one launcher cannot wait for those of another
        doing = {**others, **{job.stage: Dependency(str(run.paths.directory), job.job_id) for job in active}}
        return _carry_out(decide(run, everything, doing, before_ranks), run, launcher)


def prepare(run: Run, launchers: Launchers) -> list[Path]:
    """Write the run directory, ready for `sbatch`; returns the scripts in order.

    Raises UserError when jobs of the run are still active: they read the files that this writes.
    """
    _check_before_writing(run, Selection())
    with _alone(run):
        _refuse_active_jobs(run.paths, launchers.at_work(run))
        return _write(run)


def cancel(run: Run, launchers: Launchers) -> tuple[Job, ...]:
    """Stop the run's jobs, whichever launcher has them, and record that it was on purpose.

    Secrets of earlier jobs go too: those that Slurm ended, or that never started, could not remove them.
    """
    jobs = launchers.active_or_by_hand(run)
    launchers.cancel(run, jobs)
    for job in jobs:
        publish.write_text(run.paths.cancel_marker(job.stage, job.job_id), "")
    with contextlib.suppress(PermissionError):  # another user's
        for stage in run.plan.stages:
            publish.remove(run.paths.secrets(stage.name))
    return tuple(jobs)


def _launcher_for(run: Run, launchers: Launchers, name: str) -> Launcher:
    launcher = launchers.named(name)
    if run.config.env.container and not launcher.starts_containers:
        raise UserError(
            f"env.container: launcher {name} starts nothing in it",
            "remove it, or submit to Slurm; the image of training jobs is sagemaker.image",
        )
    return launcher


def _check_before_writing(run: Run, selection: Selection) -> None:
    """Refuse what this version would plan differently, and a new run's file or selection, which then leaves no run."""
    refuse_other_version(run)
    if not run.paths.config_path.exists():
        choose(run, selection)
        check_run(run)


def refuse_other_version(run: Run) -> None:
    """Raise UserError for a run that this version would plan differently."""
    if run.plan != plan(run.config):
        raise UserError(
            f"{run.paths.directory}: was planned by another version of hyperpod-ft",
            "continue with that version, or start a new run that shares what it can: "
            + run.journal.submit_command(str(run.paths.config_path)),
        )


@contextlib.contextmanager
def _alone(run: Run) -> Iterator[None]:
    """Exclude removals from the volume, and other submissions of this run, whose directory is there meanwhile."""
    create_run_directory(run)  # before what else can fail: every command can read the directory that an error names
    _refuse_second_root(run.paths)
    with volume_lock.submitting(run.paths.root) as volume:
        create_run_directory(run)  # a removal that this has waited for may have taken it, with a lock in it
        with publish.lock(run.paths.submit_lock, waiting="waiting for another submission of this run") as own:
            for descriptor in (volume, own):  # sbatch holds them too, which outlives a submission that is killed
                os.set_inheritable(descriptor, True)
            yield


def _refuse_active_jobs(paths: RunPaths, active: Collection[Job]) -> None:
    if active:
        jobs = ", ".join(f"{job.stage} {job.job_id}" for job in active)
        raise UserError(f"{paths.directory}: still at work: {jobs}", f"wait, or: hyperpod-ft cancel {paths.directory}")


def _use_this_volume(run: Run) -> None:
    """Forget what only containers and the store have: these jobs need it on their own volume."""
    record = run.journal.record("env")
    if record is not None and not record.outputs and run.config.env.python is None:
        publish.remove(run.paths.record_path("env"))  # of an environment in a container
    publish.remove(run.paths.store_listing)


def _carry_out(
    decision: DecidedSubmission, run: Run, launcher: Launcher, copy_sources: Callable[[Run], object] | None = None
) -> tuple[Job, ...]:
    """Write the run directory and submit the stages; returns their jobs."""
    if decision.refused:
        raise decision.refused
    if not decision.stages:
        return ()
    with _discarded(run.paths, decision):
        _write(run)
        launcher.check(run, decision.stages)
        if copy_sources and not launcher.shares_volume and run.plan["download"] in decision.stages:
            copy_sources(run)
        earlier = len(run.journal.jobs())
        launcher.submit(run, decision.stages, decision.after)
        return tuple(run.journal.jobs()[earlier:])


def _write(run: Run) -> list[Path]:
    """Write the run directory and the code that its jobs run; returns the scripts in order. Raises UserError."""
    check_run(run)
    installation = Installation(Path(sys.executable), snapshot(run.paths.code_copies))
    run.freeze()
    scripts = render(run, installation)
    for stage, text in scripts.items():
        publish.write_text(run.paths.script(stage), text)
    timestamp = _timestamp()
    run.journal.add_submission(Submission.now(installation.code), timestamp)
    publish.write_text(run.paths.provenance / f"run-{timestamp}.yaml", yaml_text.dump(run.config))
    return [run.paths.script(stage) for stage in scripts]


def create_run_directory(run: Run) -> None:
    """Make the directory of a new run, readable for every command. Raises UserError when that is not possible."""
    try:
        if not run.paths.config_path.exists():
            run.freeze()
        run.paths.logs.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cluster.root: cannot create {run.paths.directory}: {error.strerror}",
            "set it to a directory on the shared volume that you may write to",
        ) from error


def _refuse_second_root(paths: RunPaths) -> None:
    """Jobs are recognized by the path of their run directory, and find the run by it: a volume has one name."""
    try:
        root = run_file.open_frozen(paths.config_path).root
    except UserError:  # of another version, or damaged: it is rewritten
        return
    frozen = root / paths.relative(paths.config_path)
    if root != paths.root and frozen.exists() and frozen.samefile(paths.config_path):
        raise UserError(
            f"cluster.root: {paths.root}: this run was submitted below {root}, the same directory",
            f"set cluster.root to {root}",
        )


@contextlib.contextmanager
def _discarded(paths: RunPaths, decision: DecidedSubmission) -> Iterator[None]:
    """Discard what the decision says; put it back when the block fails, and the settings that it has replaced."""
    # the plan last: until then the run is the one that was to be, as after a kill in `freeze`
    settings = {path: path.read_bytes() for path in (paths.config_path, paths.plan_path) if path.is_file()}
    moved: list[tuple[Path, Path]] = []
    if decision.forces_evaluation:
        publish.write_text(paths.evaluation_forced, "")
    timestamp = _timestamp()
    try:
        for path in (*decision.forgotten, *decision.set_aside):
            if path.exists():
                aside = path.with_name(f"{path.name}.discarded-{timestamp}")
                path.rename(aside)
                moved.append((path, aside))
        yield
    except BaseException:
        for path, aside in moved:
            aside.rename(path)
        if decision.forces_evaluation:
            paths.evaluation_forced.unlink(missing_ok=True)
        for path, content in settings.items():
            if path.read_bytes() != content:
                publish.write_bytes(path, content)
        raise
    for path, aside in moved:
        if path in decision.forgotten:
            aside.unlink()


def _timestamp() -> str:
    """A part of a file name: this second and this process."""
    return f"{utc_now().replace(':', '')}-{os.getpid()}"
