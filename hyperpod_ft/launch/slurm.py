"""The kit's client of Slurm: only here are runs submitted, queried, cancelled and requeued.

It reads the text that Slurm's programs print: their JSON differs between versions.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hyperpod_ft.errors import UserError
from hyperpod_ft.launch import partitions, slurm_programs
from hyperpod_ft.launch.protocol import JobState
from hyperpod_ft.launch.slurm_programs import START_CONTROLLER, failure, without_defaults
from hyperpod_ft.planning.plan import StagePlan
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.runs.run import JOB_COMMENT, Run

# Refusals of sbatch that another run file would not avoid.
_SITE_REMEDIES = {
    "topology configuration is not available": "Slurm's topology has a fault: see docs/lifecycle.md, or ask your "
    "administrator",
    "Invalid account": "ask for a Slurm account (docs/lifecycle.md), or correct the run file's cluster.account",
}

_PENDING = "Job is pending execution"


@dataclass(frozen=True)
class _ListedJob:
    """A job as squeue, sacct or scontrol lists it. sacct keeps no comment on most clusters."""

    job_id: str
    state: JobState
    name: str
    comment: str = ""

    def is_of(self, run: Run, stages: Sequence[str]) -> bool:
        """Whether this is a job of one of these stages of the run.

        A comment of this kit decides. Where a site has put another in its place, the name does; the caller makes sure
        that the job's id is one of the run's.
        """
        if JOB_COMMENT in self.comment:
            return run.job_comment in self.comment
        return self.name in [run.job_name(stage) for stage in stages]


@dataclass(frozen=True)
class SlurmLauncher:
    """A Slurm cluster, reached through its command-line programs.

    `environment` is laid over this process's own, for example SLURM_CONF of a local cluster.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    name: str = "slurm"
    shares_environment: bool = True

    @property
    def _conf(self) -> str:
        return self.environment.get("SLURM_CONF") or os.environ.get("SLURM_CONF", "")

    def submit(self, run: Run, stages: Sequence[StagePlan], submitted: Callable[[Job], None]) -> None:
        """Submit each stage with sbatch, chained by `afterok`. The jobs inherit this environment, and so any secrets.

        Raises UserError with sbatch's message, the jobs submitted before it are cancelled then; and for a partition
        that does not have nodes of one size.
        """
        self._check_partition(run, stages)
        jobs: dict[str, Job] = {}
        try:
            for stage in stages:
                parents = [jobs[need].job_id for need in stage.needs if need in jobs]
                jobs[stage.name] = self._job(stage.name, self._sbatch(run, stage.name, parents))
                submitted(jobs[stage.name])
        except BaseException:
            # asks Slurm too: an interrupted sbatch may have created a job without printing its id
            if left := self.active(run, list(jobs.values())):
                self.cancel(run, left)
            raise

    def submit_extra(self, run: Run, name: str) -> Job:
        """Submit a script of the run that belongs to no stage, by its name. Raises UserError with sbatch's message."""
        return self._job(name, self._sbatch(run, name, []))

    def active_extra(self, run: Run, name: str) -> list[Job]:
        """This user's jobs of `submit_extra` that have not ended, by their name and comment."""
        return [
            self._job(name, listed.job_id)
            for listed in self._queue(["--me", f"--name={run.job_name(name)}"])
            if run.job_comment in listed.comment
        ]

    def active(self, run: Run, jobs: Sequence[Job]) -> list[Job]:
        """The jobs of the run that have not ended, in whatever state: `jobs`, and others of this user.

        Other users' jobs are ignored: they belong to those users' runs.
        """
        found = self._known_jobs(run, jobs, [])
        stages = {run.job_name(stage.name): stage.name for stage in run.plan.stages}
        others = [
            self._job(stages[listed.name], listed.job_id)
            for listed in self._queue(["--me"])
            if listed.job_id not in found and run.job_comment in listed.comment and listed.name in stages
        ]
        return [job for job in jobs if job.job_id in found] + others

    def states(self, run: Run, jobs: Sequence[Job]) -> dict[str, JobState]:
        """Asks squeue, then sacct, then scontrol for what is still missing.

        A job of another run is left out: a cluster that was set up again counts its jobs from 1.
        """
        found = self._known_jobs(run, jobs, ["--states=all"])
        stages = {job.job_id: job.stage for job in jobs if job.job_id not in found}
        for listed in self._accounting(list(stages)):
            if listed.job_id in stages and listed.is_of(run, [stages[listed.job_id]]):
                found[listed.job_id] = listed.state
        for job_id, stage in stages.items():
            if job_id not in found and (shown := self._show(job_id)) and shown.is_of(run, [stage]):
                found[job_id] = shown.state
        return found

    def cancel(self, run: Run, jobs: Sequence[Job]) -> None:
        done = self._run(["scancel", *(job.job_id for job in jobs)])
        if done.returncode and "Invalid job id" not in done.stderr:
            raise failure("scancel", done.stderr, "see squeue")

    def refresh(self, run: Run) -> None:
        """Jobs write to the shared volume."""

    def advance(self, run: Run) -> str:
        """Slurm starts jobs itself."""
        return ""

    def fetch_log(self, run: Run, job: Job) -> None:
        """Jobs write to the shared volume."""

    def requeue(self, job_id: str) -> None:
        """End a running job and let it wait again under the same id.

        Raises UserError with scontrol's message; it is a SlurmUnreachableError when the controller does not answer.
        """
        done = self._run(["scontrol", "requeue", job_id])
        # a slurmctld that crashed may have come back without knowing that the job has started, and starts it again
        if done.returncode and _PENDING not in done.stderr:
            raise failure(f"scontrol requeue {job_id}", done.stderr, "continue with: hyperpod-ft resume")

    def host_names(self, node_list: str) -> list[str]:
        """The nodes of a list like `node[1-4]`; empty when Slurm does not answer."""
        return self._run(["scontrol", "show", "hostnames", node_list]).stdout.split()

    def first_node_address(self, job_id: str) -> str:
        """The address at which Slurm itself reaches the first node of a running job: its name may not resolve.

        Raises UserError when Slurm does not give it.
        """
        nodes = self._field(["job", job_id], "NodeList")
        (first, *_) = self.host_names(nodes) or [nodes]
        return self._field(["node", first], "NodeAddr")

    def _check_partition(self, run: Run, stages: Sequence[StagePlan]) -> None:
        instance = run.config.instance
        whole_nodes = any(stage.resources.exclusive for stage in stages)
        if instance.has_accelerators and whole_nodes and partitions.HYPERPOD.is_dir():
            listing = self._run(["sinfo", "--noheader", "--Node", "--format=%P|%c|%N"])
            partitions.check_partition(listing.stdout, run.config.cluster.partition, instance.name)

    def _job(self, stage: str, job_id: str) -> Job:
        return Job(stage, job_id, self.name, utc_now(), self._conf)

    def _known_jobs(self, run: Run, jobs: Sequence[Job], options: list[str]) -> dict[str, JobState]:
        """The states of those of `jobs` that squeue lists."""
        stages = {job.job_id: job.stage for job in jobs}
        if not stages:
            return {}
        return {
            listed.job_id: listed.state
            for listed in self._queue([f"--jobs={','.join(stages)}", *options])
            if listed.job_id in stages and listed.is_of(run, [stages[listed.job_id]])
        }

    def _field(self, entity: list[str], name: str) -> str:
        """A field of `scontrol show job` or `scontrol show node`. Raises UserError when it is missing."""
        done = self._run(["scontrol", "show", "-o", *entity])
        for part in done.stdout.split():
            key, _, value = part.partition("=")
            if key == name and value not in ("", "(null)"):
                return value
        raise failure(f"scontrol show {' '.join(entity)}: no {name}", done.stderr, "see scontrol ping")

    def _sbatch(self, run: Run, stage: str, parents: Sequence[str]) -> str:
        # Jobs are recognized by name and comment: as arguments, they outrank SBATCH_JOB_NAME and the like.
        arguments = ["sbatch", "--parsable", "--export=ALL", f"--job-name={run.job_name(stage)}"]
        arguments += [f"--comment={run.job_comment}"]
        if parents:
            # without the second option a job whose parent failed would wait forever
            arguments += [f"--dependency=afterok:{':'.join(parents)}", "--kill-on-invalid-dep=yes"]
        done = self._run([*arguments, str(run.script(stage))], run)
        if done.returncode:
            remedies = (remedy for said, remedy in _SITE_REMEDIES.items() if said in done.stderr)
            remedy = next(remedies, "correct the run file's cluster section")
            raise failure(f"sbatch {stage}", done.stderr, remedy)
        # a site's wrapper may print a greeting first
        ids = [line for line in done.stdout.splitlines() if re.fullmatch(r"\d+(;\S*)?", line)]
        if not ids:
            raise UserError(
                f"sbatch {stage}: printed no job id: {done.stdout!r}", "have any wrapper of sbatch print its output"
            )
        return ids[-1].split(";")[0]

    def _queue(self, selection: list[str]) -> list[_ListedJob]:
        """The selected jobs; without `--states`, those that have not ended."""
        # the comment comes last: it may hold anything, the separator included
        done = self._run(["squeue", "--noheader", "--format=%i|%T|%r|%M|%N|%j|%k", *selection])
        if done.returncode and "Invalid job id" not in done.stderr:
            raise failure("squeue", done.stderr, START_CONTROLLER)
        rows = (line.split("|", 6) for line in done.stdout.splitlines())
        return [
            _ListedJob(job, JobState(state, "" if reason == "None" else reason, elapsed, nodes), name, comment)
            for job, state, reason, elapsed, nodes, name, comment in (row for row in rows if len(row) == 7)
        ]

    def _accounting(self, job_ids: Sequence[str]) -> list[_ListedJob]:
        if not job_ids or shutil.which("sacct") is None:
            return []
        columns = "--format=JobIDRaw,State,Elapsed,NodeList,JobName"
        done = self._run(["sacct", "--noheader", "--parsable2", "-X", columns, f"--jobs={','.join(job_ids)}"])
        # accounting is off on many clusters: then sacct says so and exits 1
        rows = [line.split("|", 4) for line in done.stdout.splitlines()] if done.returncode == 0 else []
        return [
            _ListedJob(job, JobState(state.split(" ")[0], "", elapsed, nodes), name)
            for job, state, elapsed, nodes, name in (row for row in rows if len(row) == 5)
        ]

    def _show(self, job_id: str) -> _ListedJob | None:
        done = self._run(["scontrol", "show", "job", "-o", job_id])
        if done.returncode:
            return None
        fields = dict(part.split("=", 1) for part in done.stdout.split() if "=" in part)
        state, reason, elapsed, nodes, name, comment = (
            fields.get(key, "") for key in ("JobState", "Reason", "RunTime", "NodeList", "JobName", "Comment")
        )
        return _ListedJob(job_id, JobState(state, reason, elapsed, nodes), name, comment)

    def _run(self, arguments: list[str], run: Run | None = None) -> subprocess.CompletedProcess[str]:
        environment = without_defaults(os.environ, _open_choices(run)) | dict(self.environment)
        return slurm_programs.run(arguments, environment, run.directory if run else None)


def _open_choices(run: Run | None) -> list[str]:
    """The variables of a site, such as SBATCH_ACCOUNT, that decide where the run file leaves the choice open."""
    keys = ("account", "partition", "qos", "reservation") if run else ()
    return [f"SBATCH_{key.upper()}" for key in keys if run and getattr(run.config.cluster, key) is None]
