"""Many runs, such as all below a root, each with its state. Each Slurm is asked once for all of them."""

from collections.abc import Sequence
from pathlib import Path

from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.slurm.launcher import SlurmLauncher
from hyperpod_ft.launch.status import RunStatus, status, status_of
from hyperpod_ft.runs.cached_run import CachedRun, RecordCache
from hyperpod_ft.runs.references import all_runs
from hyperpod_ft.runs.run import Run


def list_runs(root: Path) -> list[RunStatus]:
    """The status of every run below a root, newest first; names on stderr the runs that cannot be opened."""
    return statuses_of(all_runs(root))


def statuses_of(runs: Sequence[Run]) -> list[RunStatus]:
    """The status of each of these runs, which are below one root."""
    cache = RecordCache()
    seen = [CachedRun.now(run, cache) for run in runs]
    statuses: dict[Path, RunStatus] = {}
    asked: dict[str, tuple[SlurmLauncher, list[CachedRun]]] = {}
    for run in seen:
        jobs = run.unfinished_jobs()
        if not jobs:
            statuses[run.directory] = status_of(run, {})
            continue
        launchers = Launchers.of(run)
        slurm = launchers.slurm
        if all(job.launcher == slurm.name for job in jobs):
            # a local cluster, or the one that this process's environment names
            asked.setdefault(slurm.environment.get("SLURM_CONF", ""), (slurm, []))[1].append(run)
        else:
            statuses[run.directory] = status(run, launchers)
    for slurm, on_it in asked.values():
        for current in _of_slurm(slurm, on_it):
            statuses[Path(current.directory)] = current
    return [statuses[run.directory] for run in seen]


def _of_slurm(slurm: SlurmLauncher, runs: Sequence[CachedRun]) -> list[RunStatus]:
    """The statuses of runs with unfinished jobs on one Slurm. Records are read again after Slurm has answered."""
    jobs_of = [(run, [job for job in run.unfinished_jobs() if not job.cluster_is_gone]) for run in runs]
    try:
        answers = slurm.states_of_runs(jobs_of)
    except UserError as error:
        return [status_of(run.again(), None, str(error)) for run in runs]
    return [status_of(run.again(), states) for run, states in zip(runs, answers, strict=True)]
