"""What SageMaker starts in each container of a training job: the stages of its group, one after the other.

    python3 /opt/ml/input/data/code/entry.py

The first host runs the stages' scripts, the same ones that Slurm runs; the others do what it tells them when ranks
start. Its last act is to create the run's next training job. Exit status: 0 when every stage has left its record,
whatever its processes did afterwards. What the launcher tells a container are hyperparameters:

    job              the job's name
    stages           to run, in order, separated by spaces
    run_directory    of the run; its scripts are in `sbatch/`
    root             cluster.root: a link to channel `fsx`, or with `store` to a directory of the container
    store            S3 prefix with the same tree, for jobs without a file system
    python           interpreter of the stages, if the image has one
    pins             otherwise: requirements file below the code, for an interpreter of the container
    max_runtime      seconds that SageMaker gives the job
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Mapping

from hyperpod_ft.job.job_step import ATTEMPT_DIRECTORY, HOST_NUMBER, HOSTS
from hyperpod_ft.job.sagemaker import init, interpreter, step
from hyperpod_ft.job.sagemaker.kit import Kit
from hyperpod_ft.job.sagemaker.place import CODE, FSX, ML, JobError, Place, link_root, report_failure
from hyperpod_ft.job.sagemaker.script import NOTICED, Script, Stop

# The instance's fastest disk, which a container has for itself.
SCRATCH = Path("/tmp/hyperpod-ft")  # noqa: S108
PYTHON = Path("/tmp/hyperpod-ft-python/bin/python")  # noqa: S108
# SageMaker counts the start of the instances too, so that a container does not know how much of its time is left.
_NOTICE_SECONDS = 900
_FAREWELL_SECONDS = 5
_TERMINATED = 128 + signal.SIGTERM


def work() -> int:
    """What the child of PID 1 does; returns the container's exit status."""
    try:
        place = Place.read()
        stop = Stop(notice_after(int(place["max_runtime"])))
        place.wait_for_names()
        link_root(Path(place["root"]), SCRATCH if "store" in place.hyperparameters else ML / "input/data" / FSX)
        pins = place.hyperparameters.get("pins", "")
        python = PYTHON if pins else Path(place["python"])
        interpreter.prepare(python, pins, ML / "input/data" / CODE)
        os.environ.update(variables(place, python))
        kit = Kit(place, str(python))
        kit.pull_run()
        return lead(place, kit, stop) if place.leads else follow(place, kit, stop)
    except JobError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        report_failure(str(error))
        return 1
    except Exception as error:  # a bug: its traceback is in the log
        report_failure(repr(error))
        raise


def notice_after(max_runtime: int) -> float:
    """When the training gets its notice, in seconds after the container's start."""
    return max_runtime - min(_NOTICE_SECONDS, max_runtime / 5)


def variables(place: Place, python: Path) -> dict[str, str]:
    """What the scripts and their programs find in their environment, besides what they set themselves."""
    code = str(ML / "input/data" / CODE)
    found = {
        "PYTHONPATH": code,
        "HYPERPOD_FT_CODE": code,
        "HYPERPOD_FT_PYTHON": str(python),
        "HYPERPOD_FT_JOB_ID": place["job"],
        HOSTS: " ".join(place.hosts),
        HOST_NUMBER: str(place.number),
    }
    if store := place.hyperparameters.get("store"):
        found[step.STORE] = store
    if place.interface:
        found.update({"NCCL_SOCKET_IFNAME": place.interface, "GLOO_SOCKET_IFNAME": place.interface})
    return found


def lead(place: Place, kit: Kit, stop: Stop) -> int:
    """On the first host: run the stages, dismiss the other hosts, and have the next training job created."""
    status = 1
    try:
        status = run_stages(place, kit, stop)
    finally:
        # the others may still install packages; when this one fails, SageMaker ends them
        seconds = _FAREWELL_SECONDS if status or stop.requested else step.JOIN_SECONDS
        step.dismiss(place["job"], place.hosts, seconds)
    if status == 0 or not stop.requested:  # else it was cancelled, or SageMaker starts this job again
        kit.advance()
    return status


def run_stages(place: Place, kit: Kit, stop: Stop) -> int:
    """Run the stages until one has left no record; returns the exit status."""
    wanted = place["stages"].split()
    # with a store, each container checks an environment of its own
    own = [] if "env" in wanted or kit.is_done("env") else ["env"]
    for stage in [*own, *wanted]:
        if stop.requested or (stop.noticed and stage == NOTICED):
            return _TERMINATED
        kit.before(stage)
        with kit.during(stage):
            script, status = run_script(place, stage, stop)
        if not kit.is_done(stage):
            report_failure(script.error or f"{stage}: exit status {status}: {script.last_line}")
            return status or 1
        if stage in wanted:
            kit.after(stage)
    return 0


def run_script(place: Place, stage: str, stop: Stop) -> tuple[Script, int]:
    """Run a stage's script; it, and its exit status."""
    # where Slurm would have written what the job prints: `Run.log`
    name = f"{place.run_directory.parent.name}-{stage}_{place['job']}.out"
    script = Script(_script(place, stage), stage, {}, log=place.run_directory / "logs" / name)
    return script, script.wait(stop)


def follow(place: Place, kit: Kit, stop: Stop) -> int:
    """On another host: run the scripts that the first host asks for, until it says that the job is over."""

    def start(stage: str, given: Mapping[str, str]) -> subprocess.Popen[bytes]:
        kit.before(stage)
        Path(given[ATTEMPT_DIRECTORY]).mkdir(parents=True, exist_ok=True)
        script = Script(_script(place, stage), stage, given)
        stop.watch(script)
        return script.process

    with kit.during(NOTICED):
        return step.follow(place["job"], place.hosts[0], place.number, start, stop.expired)


def _script(place: Place, stage: str) -> Path:
    return place.run_directory / "sbatch" / f"{stage}.sbatch"


def main() -> None:
    sys.exit(init.run_as_child(work))


if __name__ == "__main__":
    main()
