"""Submit a run: choose the stages that have to run, write the run directory, hand the chain to a launcher."""

import contextlib
import getpass
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hyperpod_ft import __version__, publish
from hyperpod_ft.data.prompts import check_prompt
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.launcher import Launcher
from hyperpod_ft.launch.monitor import active_jobs
from hyperpod_ft.launch.process import Process
from hyperpod_ft.launch.render import Kit, render
from hyperpod_ft.planning.memory import Memory
from hyperpod_ft.planning.model_fit import check_model_directory
from hyperpod_ft.planning.plan import StagePlan, plan
from hyperpod_ft.runs.records import Job, utc_now
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import Selection, choose
from hyperpod_ft.shipped import PACKAGE, shipped


def submit(run: Run, launcher: Launcher, slurm: Launcher, selection: Selection) -> tuple[Job, ...]:
    """Submit what has to run and return the jobs; none when all is done.

    `slurm` is asked about earlier jobs of the run that it may still have. Raises UserError when jobs of this run are
    still active, or when this version would not plan the run as it was planned.
    """
    if run.plan != plan(run.config):
        raise UserError(
            f"{run.directory}: was planned by another version of hyperpod-ft",
            f"go on with that version, or begin a run that shares what it can: hyperpod-ft submit {run.config_path}",
        )
    with _alone(run, slurm, launcher):
        stages = choose(run, selection)
        if not stages:
            return ()
        _prepare(run)
        earlier = len(run.jobs())
        with _set_aside(run, stages if selection.force else ()):
            launcher.submit(run, stages, run.add_job)
        return tuple(run.jobs()[earlier:])


def prepare(run: Run, slurm: Launcher) -> list[Path]:
    """Write the run directory, ready for `sbatch`; returns the scripts in order.

    Raises UserError when jobs of the run are still active: they read what this writes.
    """
    with _alone(run, slurm, None):
        return _prepare(run)


def cancel(run: Run, slurm: Launcher) -> tuple[Job, ...]:
    """Stop the run's jobs, whichever launcher has them, and remember that it was on purpose."""
    jobs = active_jobs(run, slurm)
    for launcher in (slurm, Process()):
        if mine := [job for job in jobs if job.launcher == launcher.name]:
            launcher.cancel(run, mine)
    for job in jobs:
        publish.write_text(run.cancel_marker(job.stage, job.job_id), "")
    return tuple(jobs)


@contextlib.contextmanager
def _alone(run: Run, slurm: Launcher, launcher: Launcher | None) -> Iterator[None]:
    """No other submission of the run, and none of its jobs at work."""
    _make(run.logs)
    with publish.lock(run.directory / "submit.lock", waiting="another submission of this run is under way; waiting"):
        # a job that has left its record is only tidying up
        if active := [job for job in active_jobs(run, slurm, also=launcher) if not run.is_done(job.stage)]:
            jobs = ", ".join(f"{job.stage} {job.job_id}" for job in active)
            raise UserError(f"{run.directory}: still at work: {jobs}", f"wait, or: hyperpod-ft cancel {run.directory}")
        yield


def check(run: Run) -> Memory | None:
    """Refuse what would fail later, where that can be seen now.

    Prompts that are no rows of the dataset's format, an interpreter that is not there, and, when the model is here
    already, degrees that it cannot be divided by and accelerators that it does not fit (`download` does that
    otherwise). Returns what it takes of an accelerator, where that is known.
    """
    for number, prompt in enumerate(run.config.generate.prompts):
        if isinstance(prompt, dict) and run.config.dataset.format != "chat":  # chat takes the model's own template
            check_prompt(run.config.dataset, prompt, f"generate.prompts.{number}")
    if run.config.env.python and not Path(run.config.env.python).exists():
        raise UserError(f"env.python: no such file: {run.config.env.python}", "correct it, or leave it out")
    for directory in (run.base_model, Path(run.config.model.source)):
        if directory.is_absolute() and directory.is_dir():
            return check_model_directory(run.config, run.plan.degrees, directory)
    return None


def _prepare(run: Run) -> list[Path]:
    check(run)
    kit = Kit(Path(sys.executable), snapshot(run.root))
    run.freeze()
    scripts = render(run, kit)
    for stage, text in scripts.items():
        publish.write_text(run.script(stage), text)
    moment = _moment()
    publish.write_json(run.provenance / f"submission-{moment}.json", _provenance())
    publish.write_text(run.provenance / f"run-{moment}.yaml", run.yaml())
    return [run.script(stage) for stage in scripts]


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cluster.root: cannot make {directory}: {error.strerror}",
            "set it to a directory on the shared volume that you may write to",
        ) from error


def snapshot(root: Path) -> Path:
    """A copy of the kit's code on the shared volume, by content: jobs run what was submitted."""
    sources = {file: Path("hyperpod_ft") / file.relative_to(PACKAGE) for file in _code(PACKAGE)}
    templates = shipped("templates")
    sources |= {
        file: Path("hyperpod_ft/templates") / file.relative_to(templates) for file in publish.files_below(templates)
    }
    identity = publish.text_digest(
        "\n".join(f"{target} {publish.sha256(file)}" for file, target in sorted(sources.items()))
    )
    final = root / "code" / f"{__version__}-{identity[:12]}"
    with publish.lock(root / "code" / ".lock"):
        if not final.is_dir():
            with publish.new_directory(final) as directory:
                for file, target in sources.items():
                    (directory / target).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, directory / target)
    return final


def _code(package: Path) -> list[Path]:
    shipped_apart = {package / "templates", package / "examples"}
    return [
        file
        for file in publish.files_below(package)
        if "__pycache__" not in file.parts and not shipped_apart & set(file.parents)
    ]


@contextlib.contextmanager
def _set_aside(run: Run, stages: Sequence[StagePlan]) -> Iterator[None]:
    """Forget that these stages were done, unless what follows fails: then it was never forgotten.

    Checkpoints of a training are not deleted, since it would go on from them, but left under another name.
    """
    moved: list[tuple[Path, Path]] = []
    records = [run.record_path(stage.name) for stage in stages]
    training = any(stage.name == "train" for stage in stages)
    progress = [run.checkpoints, run.metrics, run.attempts, run.restarts("train")] if training else []
    moment = _moment()
    try:
        for path in [*records, *progress]:
            if path.exists():
                aside = path.with_name(f"{path.name}.discarded-{moment}")
                path.rename(aside)
                moved.append((path, aside))
        yield
    except BaseException:
        for path, aside in moved:
            aside.rename(path)
        raise
    for path, aside in moved:
        if path in records:
            aside.unlink()


def _moment() -> str:
    """A part of a name that no other moment or process of this account has."""
    return f"{utc_now().replace(':', '')}-{os.getpid()}"


def _provenance() -> dict[str, object]:
    return {
        "time": utc_now(),
        "argv": sys.argv,
        "directory": str(Path.cwd()),
        "user": getpass.getuser(),
        "host": platform.node(),
        "hyperpod_ft": __version__,
        "git": _git_state(),
    }


def _git_state() -> dict[str, object] | None:
    """Commit of the working directory, and which files differ from it; None outside a checkout."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=5)
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": git("status", "--porcelain").splitlines()}
    except (OSError, subprocess.SubprocessError):
        return None
