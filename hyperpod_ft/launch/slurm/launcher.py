"""The kit's client of Slurm: only here are runs submitted, queried, cancelled and requeued.

It reads the text that Slurm's programs print: their JSON differs between versions.
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hyperpod_ft import publish
from hyperpod_ft.annexes import annexes
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.secrets import parted
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.protocol import After, JobState, Launcher
from hyperpod_ft.launch.render import JOB_COMMENT, reads_secrets, slurm_job_comment, slurm_job_name
from hyperpod_ft.launch.slurm import programs
from hyperpod_ft.launch.slurm.programs import START_CONTROLLER, failure, without_defaults
from hyperpod_ft.launch.slurm.site import HYPERPOD, SlurmSite, check_partition
from hyperpod_ft.planning.plan import StagePlan
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import RunPaths

# Refusals of sbatch that another run file would not avoid.
_SITE_REMEDIES = {
    "topology configuration is not available": "Slurm's topology has a fault: see docs/lifecycle.md, or ask your "
    "administrator",
    "Invalid account": "ask for a Slurm account (docs/lifecycle.md), or correct the run file's cluster.account",
}
_PENDING = "Job is pending execution"
_IDS_AT_ONCE = 5_000  # Linux allows an argument 128 KiB
# Fields of `scontrol show job`, in the order of what is made of them.
_SHOWN = ("JobState", "Reason", "RunTime", "NodeList", "JobName", "WorkDir", "Comment")


@dataclass(frozen=True)
class _ListedJob:
    """A job as squeue, sacct or scontrol lists it. sacct keeps no comment on most clusters."""

    job_id: str
    state: JobState
    name: str
    directory: str  # that it was submitted from
    comment: str = ""

    def is_of(self, run: Run, stages: Sequence[str]) -> bool:
        """Whether this is a job of one of these stages of the run.

        A comment of this kit decides. Where a site has put another in its place, the name and the directory do; the
        caller makes sure that the job's id is one of the run's, which whoever wrote jobs.json may have made up.
        """
        if JOB_COMMENT in self.comment:
            return slurm_job_comment(run.paths) in self.comment
        named = self.name in [slurm_job_name(run.config, stage) for stage in stages]
        return named and self.directory in (str(run.paths.directory), str(run.paths.directory.resolve()))


def _states_among(listed: Mapping[str, _ListedJob], run: Run, jobs: Sequence[Job]) -> dict[Job, JobState]:
    """The states of those of the run's jobs that are listed."""
    return {
        job: entry.state
        for job in jobs
        if (entry := listed.get(job.job_id)) is not None and entry.is_of(run, [job.stage])
    }


@dataclass(frozen=True)
class SlurmLauncher(Launcher):
    """A Slurm cluster, reached through its command-line programs.

    `environment` is laid over this process's own, for example SLURM_CONF of a local cluster.
    """

    name: ClassVar[str] = "slurm"
    environment: Mapping[str, str] = field(default_factory=dict)

    def submit(self, run: Run, stages: Sequence[StagePlan], after: After) -> None:
        """Submit each stage with sbatch, chained by `afterok`. The jobs inherit this environment.

        Slurm keeps it in its own files. What looks like a secret is in a file of the run instead, for those stages that
        fetch or publish something.

        Raises UserError with sbatch's message, the jobs submitted before it are cancelled then; and for a partition
        that does not have nodes of one size.
        """
        self._check_partition(run.config, stages)
        jobs: dict[str, Job] = {}
        secrets = parted(os.environ).secret
        try:
            for stage in stages:
                others = after.get(stage.name, ())
                succeeded = [jobs[need].job_id for need in stage.needs if need in jobs]
                succeeded += [other.job_id for other in others if other.must_succeed]
                ended = [other.job_id for other in others if not other.must_succeed]
                _write_secrets(run.paths, stage.name, secrets if reads_secrets(run, stage.name) else {})
                jobs[stage.name] = self._job(stage.name, self._sbatch(run, stage.name, succeeded, ended))
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

    def submit_extra(self, run: Run, name: str, secrets: Mapping[str, str]) -> Job:
        """Submit a script of the run that belongs to no stage, by its name. Raises UserError with sbatch's message."""
        _write_secrets(run.paths, name, secrets)
        return self._job(name, self._sbatch(run, name))

    def active_extra(self, run: Run, name: str) -> list[Job]:
        """This user's jobs of `submit_extra` that have not ended, by their name and comment."""
        return [
            self._job(name, listed.job_id)
            for listed in self._queue(["--me", f"--name={slurm_job_name(run.config, name)}"])
            if slurm_job_comment(run.paths) in listed.comment
        ]

    def states(self, run: Run, jobs: Sequence[Job]) -> Mapping[Job, JobState]:
        """The states of `jobs`, as `states_of_runs` finds them, and of other jobs of the run that are in the queue.

        Other users' jobs among those are ignored: they belong to those users' runs.
        """
        (known,) = self.states_of_runs([(run, jobs)])
        ids = {job.job_id for job in known}
        stages = {slurm_job_name(run.config, stage.name): stage.name for stage in run.plan.stages}
        for listed in self._queue(["--me"]):
            if listed.job_id not in ids and slurm_job_comment(run.paths) in listed.comment and listed.name in stages:
                known[self._job(stages[listed.name], listed.job_id)] = listed.state
        return known

    def states_of_runs(self, jobs_of: Sequence[tuple[Run, Sequence[Job]]]) -> list[dict[Job, JobState]]:
        """The states of each run's jobs: from squeue, then sacct, then scontrol for those that are still missing.

        Each program is asked once for all: its answer takes longer than a run. A job of another run is left out: a
        cluster that was set up again counts its jobs from 1.
        """
        found: list[dict[Job, JobState]] = [{} for _ in jobs_of]
        for ask in (self._queue_of, self._accounting, self._show):
            missing = [
                [job for job in jobs if job not in known] for (_, jobs), known in zip(jobs_of, found, strict=True)
            ]
            ids = [job.job_id for jobs in missing for job in jobs]
            batches = (ids[start : start + _IDS_AT_ONCE] for start in range(0, len(ids), _IDS_AT_ONCE))
            listed = {entry.job_id: entry for batch in batches for entry in ask(batch)}
            for (run, _), jobs, known in zip(jobs_of, missing, found, strict=True):
                known.update(_states_among(listed, run, jobs))
        return found

    def cancel(self, run: Run, jobs: Sequence[Job]) -> None:
        done = self._run(["scancel", *(job.job_id for job in jobs)])
        if done.returncode and "Invalid job id" not in done.stderr:
            raise failure("scancel", done.stderr, "see squeue")

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

    def _check_partition(self, config: RunConfig, stages: Sequence[StagePlan]) -> None:
        instance = config.instance
        whole_nodes = any(stage.resources.exclusive for stage in stages)
        if instance.has_accelerators and whole_nodes and HYPERPOD.is_dir():
            site = SlurmSite(self.environment)
            partition = config.cluster.partition or site.default_partition()
            check_partition(site.nodes(), partition, instance.name)

    def _job(self, stage: str, job_id: str) -> Job:
        conf = self.environment.get("SLURM_CONF") or os.environ.get("SLURM_CONF", "")
        own = next(filter(None, (annex.slurm_name(conf) for annex in annexes())), "")
        return Job(stage, job_id, self.name, utc_now(), own)

    def _field(self, entity: list[str], name: str) -> str:
        """A field of `scontrol show job` or `scontrol show node`. Raises UserError when it is missing."""
        done = self._run(["scontrol", "show", "-o", *entity])
        for part in done.stdout.split():
            key, _, value = part.partition("=")
            if key == name and value not in ("", "(null)"):
                return value
        raise failure(f"scontrol show {' '.join(entity)}: no {name}", done.stderr, "see scontrol ping")

    def _sbatch(self, run: Run, stage: str, succeeded: Sequence[str] = (), ended: Sequence[str] = ()) -> str:
        """The id of the new job, which waits until the jobs `succeeded` have succeeded and the jobs `ended` ended."""
        # Jobs are recognized by name and comment: as arguments, they outrank SBATCH_JOB_NAME and the like.
        arguments = ["sbatch", "--parsable", "--export=ALL", f"--job-name={slurm_job_name(run.config, stage)}"]
        arguments += [f"--comment={slurm_job_comment(run.paths)}"]
        conditions = [":".join(("afterok", *succeeded))] if succeeded else []
        conditions += [":".join(("afterany", *ended))] if ended else []
        if conditions:
            # without the second option a job whose parent failed would wait forever
            arguments += [f"--dependency={','.join(conditions)}", "--kill-on-invalid-dep=yes"]
        done = self._run([*arguments, str(run.paths.script(stage))], run)
        if done.returncode:
            remedies = (remedy for said, remedy in _SITE_REMEDIES.items() if said in done.stderr)
            remedy = next(remedies, "correct the run file's cluster section")
            raise failure(f"sbatch {stage}", done.stderr, remedy)
        # a site's wrapper may print a greeting first
        ids = [line for line in done.stdout.splitlines() if re.fullmatch(r"\d+(;\S*)?", line)]
        if not ids:
            raise UserError(
                f"sbatch {stage}: printed no job id: {done.stdout!r}",
                "if sbatch is a wrapper here, have it print what sbatch prints",
            )
        return ids[-1].split(";")[0]

    def _queue_of(self, job_ids: Sequence[str]) -> list[_ListedJob]:
        return self._queue([f"--jobs={','.join(job_ids)}", "--states=all"])

    def _queue(self, selection: list[str]) -> list[_ListedJob]:
        """The selected jobs; without `--states`, those that have not ended."""
        # the comment comes last: it may hold anything, the separator included
        done = self._run(["squeue", "--noheader", "--format=%i|%T|%r|%M|%N|%j|%Z|%k", *selection])
        if done.returncode and "Invalid job id" not in done.stderr:
            raise failure("squeue", done.stderr, START_CONTROLLER)
        rows = (line.split("|", 7) for line in done.stdout.splitlines())
        return [
            _ListedJob(job, JobState(state, "" if reason == "None" else reason, elapsed, nodes), name, where, comment)
            for job, state, reason, elapsed, nodes, name, where, comment in (row for row in rows if len(row) == 8)
        ]

    def _accounting(self, job_ids: Sequence[str]) -> list[_ListedJob]:
        if shutil.which("sacct") is None:
            return []
        columns = "--format=JobIDRaw,State,Elapsed,NodeList,JobName,WorkDir"
        done = self._run(["sacct", "--noheader", "--parsable2", "-X", columns, f"--jobs={','.join(job_ids)}"])
        # accounting is off on many clusters: then sacct says so and exits 1
        rows = [line.split("|", 5) for line in done.stdout.splitlines()] if done.returncode == 0 else []
        found = [
            _ListedJob(job, JobState(state.split(" ")[0], "", elapsed, nodes), name, where)
            for job, state, elapsed, nodes, name, where in (row for row in rows if len(row) == 6)
        ]
        # squeue does not list it, so it has ended; a controller that lost its state did not report that to accounting
        return [listed for listed in found if not listed.state.active]

    def _show(self, job_ids: Sequence[str]) -> list[_ListedJob]:
        """The jobs that the controller still knows: the one, or all of them, since it takes no list of ids."""
        done = self._run(["scontrol", "show", "job", "-o", *(job_ids if len(job_ids) == 1 else ())])
        jobs = (dict(part.split("=", 1) for part in line.split() if "=" in part) for line in done.stdout.splitlines())
        return [
            _ListedJob(fields["JobId"], JobState(state, reason, elapsed, nodes), name, where, comment)
            for fields in jobs
            if "JobId" in fields
            for state, reason, elapsed, nodes, name, where, comment in [[fields.get(key, "") for key in _SHOWN]]
        ]

    def _run(self, arguments: list[str], run: Run | None = None) -> subprocess.CompletedProcess[str]:
        inherited = parted(os.environ).open if run else os.environ
        environment = without_defaults(inherited, _site_defaults(run)) | dict(self.environment)
        # A killed submission leaves its sbatch, which may still create a job: the next one waits for it to end.
        return programs.run(arguments, environment, run.paths.directory if run else None, inherits=run is not None)


def _write_secrets(paths: RunPaths, job: str, secrets: Mapping[str, str]) -> None:
    """Write the file that the job's script reads, which only this user can; it is removed when the job has ended."""
    path = paths.secrets(job)
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in secrets.items() if name.isidentifier()]
    if lines:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        publish.write_text(path, "".join(lines), mode=0o600)
    else:
        publish.remove(path)


def _site_defaults(run: Run | None) -> list[str]:
    """The variables of a site, such as SBATCH_ACCOUNT, that decide where the run file leaves the choice open."""
    keys = ("account", "partition", "qos", "reservation") if run else ()
    return [f"SBATCH_{key.upper()}" for key in keys if run and getattr(run.config.cluster, key) is None]
