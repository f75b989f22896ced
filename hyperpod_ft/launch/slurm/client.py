"""The kit's client of Slurm: only here are jobs submitted, listed, cancelled and requeued.

It reads the text that Slurm's programs print: their JSON differs between versions.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ft.config.secrets import parted
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.interface import JobState
from hyperpod_ft.launch.slurm import programs
from hyperpod_ft.launch.slurm.programs import START_CONTROLLER, failure, without_defaults

# Refusals of sbatch that another run file would not avoid.
_SITE_REMEDIES = {
    "topology configuration is not available": "Slurm's topology has a fault: see docs/cluster-day-two.md, or ask your "
    "administrator",
    "Invalid account": "ask for a Slurm account (docs/cluster-day-two.md), or correct the run file's cluster.account",
}
_PENDING = "Job is pending execution"
_SHORT_SECONDS = 5.0  # while a supervisor looks after nothing else
# Fields of `scontrol show job`, in the order of what is made of them.
_SHOWN = ("JobState", "Reason", "RunTime", "NodeList", "JobName", "WorkDir", "Comment")


def step(options: Sequence[str]) -> list[str]:
    """The command of one task on one node of this job, or, outside of one, in a job of its own."""
    return ["srun", "--nodes=1", "--ntasks=1", *options]


@dataclass(frozen=True)
class ListedJob:
    """A job as squeue, sacct or scontrol lists it. sacct keeps no comment on most clusters."""

    job_id: str
    state: JobState
    name: str
    directory: str  # that it was submitted from
    comment: str = ""


@dataclass(frozen=True)
class Slurm:
    """A Slurm cluster, reached through its command-line programs. Methods raise UserError."""

    conf: str = ""  # path of its slurm.conf, of a local cluster; empty: the one that this process's environment names

    @property
    def environment(self) -> dict[str, str]:
        """What is laid over the environment of its programs."""
        return {"SLURM_CONF": self.conf} if self.conf else {}

    def submit(self, script: Path, name: str, options: Sequence[str], directory: Path, site: Sequence[str]) -> str:
        """The id of the new job of this script. Raises UserError with sbatch's message.

        The job inherits this environment without what looks like a secret, which Slurm would keep in its own files.
        `site`: the variables of a site, such as SBATCH_ACCOUNT, that may decide for the script.
        """
        environment = without_defaults(parted(os.environ).open, site) | self.environment
        command = ["sbatch", "--parsable", "--export=ALL", *options, str(script)]
        # A killed submission leaves its sbatch, which may still create a job: the next one waits for it to end.
        done = programs.run(command, environment, directory, inherits=True)
        if done.returncode:
            remedies = (remedy for said, remedy in _SITE_REMEDIES.items() if said in done.stderr)
            remedy = next(remedies, "correct the run file's cluster section")
            raise failure(f"sbatch {name}", done.stderr, remedy)
        # a site's wrapper may print a greeting first
        ids = [line for line in done.stdout.splitlines() if re.fullmatch(r"\d+(;\S*)?", line)]
        if not ids:
            raise UserError(
                f"sbatch {name}: printed no job id: {done.stdout!r}",
                "if sbatch is a wrapper here, have it print what sbatch prints",
            )
        return ids[-1].split(";")[0]

    def cancel(self, job_ids: Sequence[str]) -> None:
        done = self._run(["scancel", *job_ids])
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

    def idle_nodes(self, partition: str, *, reserved: bool) -> int:
        """How many nodes of a partition a job can have at once; `reserved`: one that runs in a reservation.

        Not those that are planned for another job, in maintenance, or without power. 0 when Slurm refuses. Raises
        SlurmUnreachableError after a few seconds.
        """
        state = "reserved" if reserved else "idle"
        command = ["sinfo", "--noheader", "--format=%T %D", f"--partition={partition}"]
        rows = map(str.split, self._run(command, _SHORT_SECONDS).stdout.splitlines())
        return sum(int(row[1]) for row in rows if len(row) == 2 and row[0] == state)

    def first_node_address(self, job_id: str) -> str:
        """The address at which Slurm itself reaches the first node of a running job: its name may not resolve.

        Raises UserError when Slurm does not give it.
        """
        nodes = self._field(["job", job_id], "NodeList")
        (first, *_) = self.host_names(nodes) or [nodes]
        return self._field(["node", first], "NodeAddr")

    def queue(self, *selection: str) -> list[ListedJob]:
        """The selected jobs of squeue; without `--states`, those that have not ended."""
        # the comment comes last: it may hold anything, the separator included
        done = self._run(["squeue", "--noheader", "--format=%i|%T|%r|%M|%N|%j|%Z|%k", *selection])
        if done.returncode and "Invalid job id" not in done.stderr:
            raise failure("squeue", done.stderr, START_CONTROLLER)
        rows = (line.split("|", 7) for line in done.stdout.splitlines())
        return [
            ListedJob(job, JobState(state, "" if reason == "None" else reason, elapsed, nodes), name, where, comment)
            for job, state, reason, elapsed, nodes, name, where, comment in (row for row in rows if len(row) == 8)
        ]

    def queued(self, job_ids: Sequence[str]) -> list[ListedJob]:
        """Those of the jobs that squeue still lists."""
        return self.queue(f"--jobs={','.join(job_ids)}", "--states=all")

    def accounted(self, job_ids: Sequence[str]) -> list[ListedJob]:
        """Those of the jobs that have ended by the accounting, where the site has one."""
        if shutil.which("sacct") is None:
            return []
        columns = "--format=JobIDRaw,State,Elapsed,NodeList,JobName,WorkDir"
        done = self._run(["sacct", "--noheader", "--parsable2", "-X", columns, f"--jobs={','.join(job_ids)}"])
        # accounting is off on many clusters: then sacct says so and exits 1
        rows = [line.split("|", 5) for line in done.stdout.splitlines()] if done.returncode == 0 else []
        found = [
            ListedJob(job, JobState(state.split(" ")[0], "", elapsed, nodes), name, where)
            for job, state, elapsed, nodes, name, where in (row for row in rows if len(row) == 6)
        ]
        # squeue does not list it, so it has ended; a controller that lost its state did not report that to accounting
        return [listed for listed in found if not listed.state.active]

    def known_to_controller(self, job_ids: Sequence[str]) -> list[ListedJob]:
        """The jobs that the controller still knows: the one, or all of them, since it takes no list of ids."""
        done = self._run(["scontrol", "show", "job", "-o", *(job_ids if len(job_ids) == 1 else ())])
        jobs = (dict(part.split("=", 1) for part in line.split() if "=" in part) for line in done.stdout.splitlines())
        return [
            ListedJob(fields["JobId"], JobState(state, reason, elapsed, nodes), name, where, comment)
            for fields in jobs
            if "JobId" in fields
            for state, reason, elapsed, nodes, name, where, comment in [[fields.get(key, "") for key in _SHOWN]]
        ]

    def _field(self, entity: list[str], name: str) -> str:
        """A field of `scontrol show job` or `scontrol show node`. Raises UserError when it is missing."""
        done = self._run(["scontrol", "show", "-o", *entity])
        for part in done.stdout.split():
            key, _, value = part.partition("=")
            if key == name and value not in ("", "(null)"):
                return value
        raise failure(f"scontrol show {' '.join(entity)}: no {name}", done.stderr, "see scontrol ping")

    def _run(self, arguments: list[str], seconds: float = programs.TIMEOUT_SECONDS) -> subprocess.CompletedProcess[str]:
        return programs.run(arguments, without_defaults(os.environ) | self.environment, seconds=seconds)
