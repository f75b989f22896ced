"""A Slurm job that serves a run's model on a node of the cluster, and how to reach it."""

import os
import platform
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from hyperpod_ft import publish
from hyperpod_ft.config.fields import TimeLimit
from hyperpod_ft.errors import UserError, last_line
from hyperpod_ft.launch.interface import JobState
from hyperpod_ft.launch.render import Installation, render_extra
from hyperpod_ft.launch.slurm.client import Slurm
from hyperpod_ft.launch.slurm.launcher import active_extra, cluster_is_gone, states_of_runs, submit_extra
from hyperpod_ft.launch.snapshot import snapshot
from hyperpod_ft.planning.plan import Resources
from hyperpod_ft.progress import ChangeReporter, PrintLine, pause, polls
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import RunPaths
from hyperpod_ft.serving.http.connection import API_KEY

JOB = "serve"
_JOB = TypeAdapter(Job)
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Address:
    """Where a server listens: on `host`, an address of machine `node` itself."""

    node: str
    host: str
    port: int


_ADDRESS = TypeAdapter(Address)


def start(run: Run, slurm: Slurm, wanted: Resources, options: Sequence[str], environment: Mapping[str, str]) -> Job:
    """Submit the job. `options`: those of `python -m hyperpod_ft.serving`; `environment`: more variables for it.

    Raises UserError when a job already serves this run, or Slurm refuses it.
    """
    if earlier := active(run, slurm):
        raise UserError(
            f"{run.paths.directory}: job {earlier[0].job_id} already serves it",
            f"hyperpod-ft serve {run.paths.directory} --stop",
        )
    installation = Installation(Path(sys.executable), snapshot(run.paths.code_copies))
    run.paths.logs.mkdir(exist_ok=True)
    publish.write_text(run.paths.script(JOB), script(run, installation, wanted, options, environment))
    # other users of the node can reach its port
    key = os.environ.get(API_KEY) or secrets.token_urlsafe(24)
    job = submit_extra(slurm, run, JOB, {API_KEY: key})
    publish.write_json(_record(run.paths), asdict(job))
    return job


def script(
    run: Run, installation: Installation, wanted: Resources, options: Sequence[str], environment: Mapping[str, str]
) -> str:
    """The job's script; as for `start`."""
    values = {"options": options, "variables": environment}
    return render_extra(run, installation, JOB, wanted, "serving/serve.sbatch.j2", **values)


def resources(run: Run, time_limit: str | None, *, accelerators: bool) -> Resources:
    """The resources of stage generate, which holds the models too; with `accelerators`, a whole node that has them.

    Raises UserError for an invalid time limit.
    """
    if time_limit is not None:
        try:
            TypeAdapter(TimeLimit).validate_python(time_limit)
        except ValidationError as error:
            raise UserError(f"--time {time_limit}: is not a time limit of Slurm", "e.g. 08:00:00") from error
    wanted = run.plan["generate"].resources
    if accelerators and run.config.instance.has_accelerators:
        wanted = replace(wanted, nodes=1, cpus=None, partition=run.config.cluster.partition)
    return replace(wanted, time_limit=time_limit or wanted.time_limit)


def wait(run: Run, slurm: Slurm, job: Job, report: PrintLine) -> Address:
    """Wait until the server answers; `report` gets a line whenever the job's state changes.

    Raises UserError when the job ends before, or its address is damaged.
    """
    report_state = ChangeReporter(report)
    address = _address(run.paths, job)
    for _ in polls(_POLL_SECONDS):
        try:
            found = _ADDRESS.validate_json(address.read_bytes())
            break
        except FileNotFoundError:
            state = _state(run, slurm, job)
        except ValueError as error:
            raise UserError(f"{address}: is damaged", f"hyperpod-ft serve {run.paths.directory} --stop") from error
        if not state.active:
            log = run.paths.log(JOB, job.job_id)
            reason = last_line(log.read_text(encoding="utf-8", errors="replace")) if log.exists() else "it has no log"
            raise UserError(f"job {job.job_id} ended ({state.state}): {reason}", f"see {log}")
        report_state(f"job {job.job_id}", f"{state.state.lower()} {state.reason or state.nodes}".rstrip())
    return found


def directions(paths: RunPaths, job: Job, address: Address) -> list[str]:
    """How to reach the server from here, and how to end it."""
    local = address.node == platform.node()
    here = address.port if local else 8000
    tunnel = f"ssh -N -L {here}:{address.host}:{address.port} {address.node}"
    return [
        f"job {job.job_id} serves {paths.full_name} on {address.node}, port {address.port}",
        *([f"Tunnel: {tunnel}"] * (not local)),
        f"URL:    http://127.0.0.1:{here}/v1",
        f"Key:    source {shlex.quote(str(paths.secrets(JOB)))}  # sets {API_KEY}",
        f"Log:    {paths.log(JOB, job.job_id)}",
        f"Stop:   hyperpod-ft serve {paths.directory} --stop",
    ]


def stop(run: Run, slurm: Slurm) -> list[Job]:
    """Cancel the jobs that serve the run, and wait until they have ended. Several were started at the same moment."""
    jobs = active(run, slurm)
    if jobs:
        slurm.cancel([job.job_id for job in jobs])
    while any(_state(run, slurm, job).active for job in jobs):
        pause(_POLL_SECONDS)
    publish.remove(run.paths.secrets(JOB))
    return jobs


def _state(run: Run, slurm: Slurm, job: Job) -> JobState:
    if cluster_is_gone(job):
        return JobState("CANCELLED")
    # a job that Slurm has forgotten has ended
    return states_of_runs(slurm, [(run, [job])])[0].get(job, JobState("COMPLETED"))


def active(run: Run, slurm: Slurm) -> list[Job]:
    """The jobs that serve the run: the recorded one, and those of a `start` that was killed before it recorded them.

    Raises UserError when Slurm does not answer, or the record is damaged.
    """
    recorded = _recorded(run.paths)
    if recorded is not None and cluster_is_gone(recorded):
        return []
    listed = active_extra(slurm, run, JOB)
    if recorded is None or recorded.job_id in [job.job_id for job in listed] or not _state(run, slurm, recorded).active:
        return listed
    return [recorded, *listed]  # a site may have put another comment in place of the kit's


def _recorded(paths: RunPaths) -> Job | None:
    try:
        return _JOB.validate_json(_record(paths).read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(
            f"{_record(paths)}: is damaged",
            "cancel the job that serves the run, if there is one (see squeue), and remove it",
        ) from error


def _record(paths: RunPaths) -> Path:
    return paths.serving / "job.json"


def _address(paths: RunPaths, job: Job) -> Path:
    """What the job writes once it answers."""
    return paths.serving / f"{job.job_id}.json"
