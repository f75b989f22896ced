"""Launcher `slurm`: a run as jobs of a Slurm cluster, each of which waits for those that it needs."""

import contextlib
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import ClassVar

from hyperpod_ft import publish
from hyperpod_ft.annexes import annexes, slurm_conf
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.secrets import parted
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.interface import After, JobState, Launcher
from hyperpod_ft.launch.render import JOB_COMMENT, reads_secrets, slurm_job_comment, slurm_job_name
from hyperpod_ft.launch.slurm.client import ListedJob, Slurm
from hyperpod_ft.launch.slurm.site import HYPERPOD, SlurmSite, check_partition
from hyperpod_ft.planning.plan import StagePlan
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import RunPaths

_NAME = "slurm"
_IDS_AT_ONCE = 5_000  # Linux allows an argument 128 KiB


def slurm_of(run: Run) -> Slurm:
    """The local cluster that the run was last submitted to, if it is up and this user's.

    The default one, if up, for a run of instance type `local` when that one has ended or the run was never submitted to
    a Slurm, unless SLURM_CONF is set. A run submitted to another Slurm stays there.
    """
    last = next((job for job in reversed(run.journal.jobs()) if job.launcher == _NAME), None)
    if last and not last.local_cluster:
        return Slurm()
    conf = slurm_conf(last.local_cluster) if last else None
    if run.config.cluster.instance_type == "local" and "SLURM_CONF" not in os.environ:
        conf = conf or slurm_conf("")
    return Slurm(str(conf or ""))


def job_options(run: Run) -> list[str]:
    """srun's options for a job on a node of the training, as its script has them."""
    cluster, resources = run.config.cluster, run.plan["train"].resources
    given = {"partition": resources.partition, "time": resources.time_limit, "cpus-per-task": resources.cpus}
    given |= {"account": cluster.account, "qos": cluster.qos, "reservation": cluster.reservation}
    whole = ["--exclusive", "--mem=0"] if resources.exclusive else []
    return [f"--{name}={value}" for name, value in given.items() if value] + whole


def cluster_is_gone(job: Job) -> bool:
    """Whether the job was submitted to a local cluster that has ended, or is another user's."""
    return bool(job.local_cluster) and slurm_conf(job.local_cluster) is None


def states_of_runs(slurm: Slurm, jobs_of: Sequence[tuple[Run, Sequence[Job]]]) -> list[dict[Job, JobState]]:
    """The states of each run's jobs: from squeue, then sacct, then scontrol for those that are still missing.

    Each program is asked once for all: its answer takes longer than a run. A job of another run is left out: a
    cluster that was set up again counts its jobs from 1.
    """
    found: list[dict[Job, JobState]] = [{} for _ in jobs_of]
    for ask in (slurm.queued, slurm.accounted, slurm.known_to_controller):
        missing = [[job for job in jobs if job not in known] for (_, jobs), known in zip(jobs_of, found, strict=True)]
        ids = [job.job_id for jobs in missing for job in jobs]
        batches = (ids[start : start + _IDS_AT_ONCE] for start in range(0, len(ids), _IDS_AT_ONCE))
        listed = {entry.job_id: entry for batch in batches for entry in ask(batch)}
        for (run, _), jobs, known in zip(jobs_of, missing, found, strict=True):
            for job in jobs:
                if (entry := listed.get(job.job_id)) is not None and _is_of(entry, run, job.stage):
                    known[job] = entry.state
    return found


def submit_extra(slurm: Slurm, run: Run, name: str, secrets: Mapping[str, str]) -> Job:
    """Submit a script of the run that belongs to no stage, by its name. Raises UserError with sbatch's message."""
    _write_secrets(run.paths, name, secrets)
    return _sbatch(slurm, run, name)


def active_extra(slurm: Slurm, run: Run, name: str) -> list[Job]:
    """This user's jobs of `submit_extra` that have not ended, by their name and comment."""
    return [
        _job(slurm, name, listed.job_id)
        for listed in slurm.queue("--me", f"--name={slurm_job_name(run.config, name)}")
        if slurm_job_comment(run.paths) in listed.comment
    ]


class SlurmLauncher(Launcher):
    """The Slurm cluster of each run."""

    name: ClassVar[str] = _NAME
    starts_containers: ClassVar[bool] = True

    def submit(self, run: Run, stages: Sequence[StagePlan], after: After) -> None:
        """Submit each stage with sbatch, chained by `afterok`. The jobs inherit this environment.

        What looks like a secret is in a file of the run instead, for those stages that fetch or publish something.

        Raises UserError with sbatch's message, the jobs submitted before it are cancelled then; and for a partition
        that does not have nodes of one size.
        """
        slurm = slurm_of(run)
        _check_partition(slurm, run.config, stages)
        jobs: dict[str, Job] = {}
        secrets = parted(os.environ).secret
        try:
            for stage in stages:
                others = after.get(stage.name, ())
                succeeded = [jobs[need].job_id for need in stage.needs if need in jobs]
                succeeded += [other.job_id for other in others if other.must_succeed]
                ended = [other.job_id for other in others if not other.must_succeed]
                _write_secrets(run.paths, stage.name, secrets if reads_secrets(run, stage.name) else {})
                jobs[stage.name] = _sbatch(slurm, run, stage.name, succeeded, ended)
                run.journal.add_job(jobs[stage.name])
        except BaseException:
            # asks Slurm too: an interrupted sbatch may have created a job without printing its id
            with contextlib.suppress(UserError):  # no answer: jobs that may be there need their secrets until `cancel`
                known = self.states(run, list(jobs.values()))
                if left := [job for job, state in known.items() if state.active]:
                    self.cancel(run, left)
                for stage in stages:
                    publish.remove(run.paths.secrets(stage.name))
            raise

    def states(self, run: Run, jobs: Sequence[Job]) -> Mapping[Job, JobState]:
        """The states of `jobs`, as `states_of_runs` finds them, and of other jobs of the run that are in the queue.

        Other users' jobs among those are ignored: they belong to those users' runs.
        """
        slurm = slurm_of(run)
        (known,) = states_of_runs(slurm, [(run, jobs)])
        ids = {job.job_id for job in known}
        stages = {slurm_job_name(run.config, stage.name): stage.name for stage in run.plan.stages}
        for listed in slurm.queue("--me"):
            if listed.job_id not in ids and slurm_job_comment(run.paths) in listed.comment and listed.name in stages:
                known[_job(slurm, stages[listed.name], listed.job_id)] = listed.state
        return known

    def cancel(self, run: Run, jobs: Sequence[Job]) -> None:
        slurm_of(run).cancel([job.job_id for job in jobs])


def _is_of(listed: ListedJob, run: Run, stage: str) -> bool:
    """Whether this is a job of this stage of the run.

    A comment of this kit decides. Where a site has put another in its place, the name and the directory do; the
    caller makes sure that the job's id is one of the run's, which whoever wrote jobs.json may have made up.
    """
    if JOB_COMMENT in listed.comment:
        return slurm_job_comment(run.paths) in listed.comment
    directories = (str(run.paths.directory), str(run.paths.directory.resolve()))
    return listed.name == slurm_job_name(run.config, stage) and listed.directory in directories


def _sbatch(slurm: Slurm, run: Run, name: str, succeeded: Sequence[str] = (), ended: Sequence[str] = ()) -> Job:
    """The new job, which waits until the jobs `succeeded` have succeeded and the jobs `ended` ended."""
    # Jobs are recognized by name and comment: as arguments, they outrank SBATCH_JOB_NAME and the like.
    options = [f"--job-name={slurm_job_name(run.config, name)}", f"--comment={slurm_job_comment(run.paths)}"]
    conditions = [":".join(("afterok", *succeeded))] if succeeded else []
    conditions += [":".join(("afterany", *ended))] if ended else []
    if conditions:
        # without the second option a job whose parent failed would wait forever
        options += [f"--dependency={','.join(conditions)}", "--kill-on-invalid-dep=yes"]
    cluster = run.config.cluster
    keys = ("account", "partition", "qos", "reservation")
    site = [f"SBATCH_{key.upper()}" for key in keys if getattr(cluster, key) is None]
    return _job(slurm, name, slurm.submit(run.paths.script(name), name, options, run.paths.directory, site))


def _job(slurm: Slurm, stage: str, job_id: str) -> Job:
    conf = slurm.conf or os.environ.get("SLURM_CONF", "")
    own = next(filter(None, (annex.slurm_name(conf) for annex in annexes())), "")
    return Job(stage, job_id, _NAME, utc_now(), own)


def _check_partition(slurm: Slurm, config: RunConfig, stages: Sequence[StagePlan]) -> None:
    instance = config.instance
    whole_nodes = any(stage.resources.exclusive for stage in stages)
    if instance.has_accelerators and whole_nodes and HYPERPOD.is_dir():
        site = SlurmSite(slurm.environment)
        check_partition(site.nodes(), config.cluster.partition or site.default_partition(), instance.name)


def _write_secrets(paths: RunPaths, job: str, secrets: Mapping[str, str]) -> None:
    """Write the file that the job's script reads, which only this user can; it is removed when the job has ended."""
    path = paths.secrets(job)
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in secrets.items() if name.isidentifier()]
    if lines:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        publish.write_text(path, "".join(lines), mode=0o600)
    else:
        publish.remove(path)
