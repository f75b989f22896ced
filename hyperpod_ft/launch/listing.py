"""Many runs, such as all below a root, each with its state. Each Slurm is asked once for all of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.slurm.launcher import SlurmLauncher
from hyperpod_ft.launch.status import RunStatus, status, status_of
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.references import all_runs
from hyperpod_ft.runs.run import Run


def list_runs(root: Path) -> list[RunStatus]:
    """The status of every run below a root, newest first; names on stderr the runs that cannot be read."""
    # runs that were submitted in the same second stay in the order of their files
    return sorted(statuses_of(all_runs(root)), key=lambda current: current.submitted, reverse=True)


def statuses_of(runs: Sequence[Run]) -> list[RunStatus]:
    """The status of each of these runs, which are below one root."""
    statuses: dict[Path, RunStatus] = {}
    asked: dict[str, tuple[SlurmLauncher, list[tuple[Run, Mapping[str, Job]]]]] = {}
    for run in runs:
        jobs = run.journal.latest_jobs()
        unfinished = run.journal.unfinished(jobs)
        if not unfinished:
            statuses[run.paths.directory] = status_of(run, jobs, {})
            continue
        launchers = Launchers.of(run)
        slurm = launchers.slurm
        if all(job.launcher == slurm.name for job in unfinished):
            # a local cluster, or the one that this process's environment names
            asked.setdefault(slurm.environment.get("SLURM_CONF", ""), (slurm, []))[1].append((run, jobs))
        else:
            statuses[run.paths.directory] = status(run, launchers)
    for slurm, on_it in asked.values():
        for current in _of_slurm(slurm, on_it):
            statuses[Path(current.directory)] = current
    return [statuses[run.paths.directory] for run in runs]


def _of_slurm(slurm: SlurmLauncher, seen: Sequence[tuple[Run, Mapping[str, Job]]]) -> list[RunStatus]:
    """The statuses of runs with unfinished jobs on one Slurm. Records are read after Slurm has answered."""
    jobs_of = [(run, [job for job in run.journal.unfinished(jobs) if not job.cluster_is_gone]) for run, jobs in seen]
    try:
        answers = slurm.states_of_runs(jobs_of)
    except UserError as error:
        return [status_of(run, jobs, None, str(error)) for run, jobs in seen]
    return [status_of(run, jobs, states) for (run, jobs), states in zip(seen, answers, strict=True)]
