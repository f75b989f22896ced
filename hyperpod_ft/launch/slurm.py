"""The only module that starts Slurm's programs. It reads their text: the JSON differs between Slurm versions."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hyperpod_ft.errors import UserError, last_line
from hyperpod_ft.launch.launcher import JobState
from hyperpod_ft.planning.plan import StagePlan
from hyperpod_ft.runs.records import Job, utc_now
from hyperpod_ft.runs.run import Run

_TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class Slurm:
    """A Slurm cluster, reached through its command-line programs.

    `environment` is laid over this process's own, for example SLURM_CONF of a local cluster.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    name: str = "slurm"

    @property
    def _conf(self) -> str:
        return self.environment.get("SLURM_CONF") or os.environ.get("SLURM_CONF", "")

    def submit(self, run: Run, stages: Sequence[StagePlan], submitted: Callable[[Job], None]) -> None:
        """One sbatch a stage, chained by `afterok`. The jobs inherit this environment: how secrets reach them.

        Raises UserError with sbatch's own words; what was submitted before is cancelled then.
        """
        jobs: dict[str, Job] = {}
        try:
            for stage in stages:
                parents = [jobs[need].job_id for need in stage.needs if need in jobs]
                jobs[stage.name] = Job(
                    stage.name, self._sbatch(run, stage.name, parents), self.name, utc_now(), self._conf
                )
                submitted(jobs[stage.name])
        except BaseException:
            # asks Slurm too: an sbatch that was interrupted may have made a job without saying so
            if left := self.active(run, list(jobs.values())):
                self.cancel(run, left)
            raise

    def active(self, run: Run, jobs: Sequence[Job]) -> list[Job]:
        """One squeue, which lists every job that has not ended, whatever its state is called."""
        known = {job.job_id: job for job in jobs}
        stages = {run.job_name(stage.name): stage.name for stage in run.plan.stages}
        found = []
        for job_id, _, comment, name in self._queue([]):
            ours = name in stages and comment == run.plan.run_id
            if job_id in known and (name == run.job_name(known[job_id].stage) or comment == run.plan.run_id):
                found.append(known[job_id])
            elif ours:
                found.append(Job(stages[name], job_id, self.name, utc_now(), self._conf))
        return found

    def states(self, run: Run, jobs: Sequence[Job]) -> dict[str, JobState]:
        """Asks squeue, then sacct, then scontrol for what is still missing.

        A job of another name and comment is someone else's: a cluster that was set up anew counts from 1 again.
        """
        names = {job.job_id: run.job_name(job.stage) for job in jobs}
        if not names:
            return {}
        found = {
            job: state
            for job, state, comment, name in self._queue([f"--jobs={','.join(names)}", "--states=all"])
            if name == names.get(job) or comment == run.plan.run_id
        }
        if missing := {job: name for job, name in names.items() if job not in found}:
            found |= self._accounting(missing)
        for job in names.keys() - found.keys():
            found |= self._control(job, names[job], run.plan.run_id)
        return found

    def cancel(self, run: Run, jobs: Sequence[Job]) -> None:
        done = self._run(["scancel", *(job.job_id for job in jobs)])
        if done.returncode and "Invalid job id" not in done.stderr:
            raise UserError(f"scancel: {_message(done.stderr)}", "see squeue")

    def requeue(self, job_id: str) -> None:
        """Have a job that runs end and wait to run again, under the same id. Raises UserError with scontrol's words."""
        done = self._run(["scontrol", "requeue", job_id])
        if done.returncode:
            raise UserError(f"scontrol requeue {job_id}: {_message(done.stderr)}", "go on with: hyperpod-ft resume")

    def host_names(self, node_list: str) -> list[str]:
        """The nodes of a list like `node[1-4]`; none when Slurm does not say."""
        return self._run(["scontrol", "show", "hostnames", node_list]).stdout.split()

    def first_node_address(self, job_id: str) -> str:
        """The address at which Slurm itself reaches the first node of a running job: its name may not resolve.

        Raises UserError when Slurm does not give it.
        """
        nodes = self._field(["job", job_id], "NodeList")
        (first, *_) = self.host_names(nodes) or [nodes]
        return self._field(["node", first], "NodeAddr")

    def _field(self, entity: list[str], name: str) -> str:
        """A field of `scontrol show job` or `scontrol show node`. Raises UserError when it is missing."""
        done = self._run(["scontrol", "show", "-o", *entity])
        for part in done.stdout.split():
            key, _, value = part.partition("=")
            if key == name and value not in ("", "(null)"):
                return value
        raise UserError(f"scontrol show {' '.join(entity)}: no {name}: {_message(done.stderr)}", "see scontrol ping")

    def _sbatch(self, run: Run, stage: str, parents: Sequence[str]) -> str:
        # by argument what the environment (SBATCH_JOB_NAME) may not change: jobs are known by it
        arguments = ["sbatch", "--parsable", "--export=ALL", f"--job-name={run.job_name(stage)}"]
        arguments += [f"--comment={run.plan.run_id}"]
        if parents:
            # without the second option a job whose parent failed would wait for ever
            arguments += [f"--dependency=afterok:{':'.join(parents)}", "--kill-on-invalid-dep=yes"]
        done = self._run([*arguments, str(run.script(stage))], run)
        if done.returncode:
            remedy = "correct the run file's cluster section"
            if "configuration source" in done.stderr:
                remedy = "run this on a Slurm head node, or start a cluster here: hyperpod-ft local up"
            raise UserError(f"sbatch {stage}: {_message(done.stderr)}", remedy)
        # a site's wrapper may greet first
        ids = [line for line in done.stdout.splitlines() if re.fullmatch(r"\d+(;\S*)?", line)]
        if not ids:
            raise UserError(f"sbatch {stage}: no job id in its answer: {done.stdout!r}", "is sbatch a wrapper here?")
        return ids[-1].split(";")[0]

    def _queue(self, selection: list[str]) -> Iterator[tuple[str, JobState, str, str]]:
        """Job id, state, comment and name of the selected jobs; of all that have not ended for no selection."""
        done = self._run(["squeue", "--noheader", "--format=%i|%T|%r|%M|%N|%k|%j", *selection])
        if done.returncode and "Invalid job id" not in done.stderr:
            raise UserError(f"squeue: {_message(done.stderr)}", "is slurmctld running?")
        for line in done.stdout.splitlines():
            fields = line.split("|", 6)
            if len(fields) == 7:
                job, state, reason, elapsed, nodes, comment, name = fields
                yield job, JobState(state, "" if reason == "None" else reason, elapsed, nodes), comment, name

    def _accounting(self, names: Mapping[str, str]) -> dict[str, JobState]:
        if shutil.which("sacct") is None:
            return {}
        columns = "--format=JobIDRaw,State,Elapsed,NodeList,JobName"
        done = self._run(["sacct", "--noheader", "--parsable2", "-X", columns, f"--jobs={','.join(names)}"])
        found = {}
        # accounting is off on many clusters: then sacct says so and exits 1
        for line in done.stdout.splitlines() if done.returncode == 0 else []:
            fields = line.split("|", 4)
            if len(fields) == 5 and fields[4] == names.get(fields[0]):
                found[fields[0]] = JobState(fields[1].split(" ")[0], "", fields[2], fields[3])
        return found

    def _control(self, job: str, name: str, comment: str) -> dict[str, JobState]:
        done = self._run(["scontrol", "show", "job", "-o", job])
        fields = dict(part.split("=", 1) for part in done.stdout.split() if "=" in part)
        if done.returncode or (fields.get("JobName") != name and fields.get("Comment") != comment):
            return {}
        state, reason, elapsed, nodes = (fields.get(key, "") for key in ("JobState", "Reason", "RunTime", "NodeList"))
        return {job: JobState(state, reason, elapsed, nodes)}

    def _run(self, arguments: list[str], run: Run | None = None) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                arguments,
                cwd=run.directory if run else None,
                env=_without_defaults(os.environ, run) | dict(self.environment),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_SECONDS,
                check=False,
            )
        except FileNotFoundError as error:
            raise UserError(
                f"{arguments[0]}: not found on this machine",
                "run this on a Slurm head node, start a cluster here (`hyperpod-ft local up`),"
                " or use --launcher process",
            ) from error
        except subprocess.TimeoutExpired as error:
            raise UserError(f"{arguments[0]}: no answer in {_TIMEOUT_SECONDS} s", "is slurmctld running?") from error


def _without_defaults(environment: Mapping[str, str], run: Run | None) -> dict[str, str]:
    """The environment without what would change these programs' answers or outrank the run file.

    A site's SBATCH_ACCOUNT and the like stay where the run file leaves the choice open.
    """
    cluster = run.config.cluster if run else None
    open_choices = {
        f"SBATCH_{key.upper()}"
        for key in ("account", "partition", "qos", "reservation")
        if cluster is not None and getattr(cluster, key) is None
    }
    return {
        name: value
        for name, value in environment.items()
        if name in open_choices or not name.startswith(("SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_"))
    }


def _message(text: str) -> str:
    return re.sub(r"^\w+: (error|fatal): ", "", last_line(text)) or "gave no error message"
