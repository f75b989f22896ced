"""What SageMaker starts in each container of a training job: the stages of its group, one after the other.

    python3 /opt/ml/input/data/code/entry.py

The first host runs the stages' scripts, the same ones that Slurm runs; the others do what it tells them when ranks
start. Exit status: 0 when every stage has left its record, whatever its processes did afterwards. What the launcher
tells a container are hyperparameters:

    job              the job's name
    stages           to run, in order, separated by spaces
    run_directory    of the run; its scripts are in `sbatch/`
    root             cluster.root: a link to channel `fsx`, or with `store` to a directory of the container
    store            S3 prefix with the same tree, for jobs without a file system
    python           interpreter of the stages
    pins             requirements file below the code to create `python` with, when the image has no such file
    max_runtime      seconds that SageMaker gives the job
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Mapping

from hyperpod_ft.job.job_step import HOST_NUMBER, HOSTS
from hyperpod_ft.job.sagemaker import init, interpreter, step
from hyperpod_ft.job.sagemaker.place import CODE, FSX, ML, JobError, Place, link_root, report_failure
from hyperpod_ft.job.sagemaker.script import NOTICED, Script, Stop

SCRATCH = Path("/tmp/hyperpod-ft")  # noqa: S108 - the instance's fastest disk; a container has it for itself
# SageMaker counts the start of the instances too, so that a container does not know how much of its time is left.
_NOTICE_SECONDS = 900
_TERMINATED = 128 + signal.SIGTERM


def work() -> int:
    """What the child of PID 1 does; returns the container's exit status."""
    try:
        place = Place.read()
        stop = Stop(notice_after(int(place["max_runtime"])))
        place.wait_for_names()
        link_root(Path(place["root"]), SCRATCH if "store" in place.hyperparameters else ML / "input/data" / FSX)
        interpreter.prepare(Path(place["python"]), place.hyperparameters.get("pins", ""), ML / "input/data" / CODE)
        os.environ.update(variables(place))
        if not place.leads:
            return follow(place, stop)
        status = lead(place, stop)
    except JobError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        report_failure(str(error))
        status = 1
    except Exception as error:  # a bug: its traceback is in the log
        report_failure(repr(error))
        raise
    return status


def notice_after(max_runtime: int) -> float:
    """When the training gets its notice, in seconds after the container's start."""
    return max_runtime - min(_NOTICE_SECONDS, max_runtime / 5)


def variables(place: Place) -> dict[str, str]:
    """What the scripts and their programs find in their environment, besides what they set themselves."""
    found = {
        "HYPERPOD_FT_JOB_ID": place["job"],
        "HYPERPOD_FT_PYTHON": place["python"],
        "HYPERPOD_FT_CODE": str(ML / "input/data" / CODE),
        HOSTS: " ".join(place.hosts),
        HOST_NUMBER: str(place.number),
    }
    if place.interface:
        found.update({"NCCL_SOCKET_IFNAME": place.interface, "GLOO_SOCKET_IFNAME": place.interface})
    return found


def lead(place: Place, stop: Stop) -> int:
    """Run the stages on the first host, then dismiss the others."""
    status = 1
    try:
        status = run_stages(place, stop)
    finally:
        step.dismiss(place["job"], place.hosts, status, seconds=5 if stop.requested else 30)
    return status


def run_stages(place: Place, stop: Stop) -> int:
    """Run the stages until one has left no record; returns the exit status."""
    for stage in place["stages"].split():
        if stop.requested or (stop.noticed and stage == NOTICED):
            return _TERMINATED
        script = Script(_script(place, stage), stage, {}, log=_log(place, stage))
        status = script.wait(stop)
        if not is_done(place, stage):
            report_failure(script.error or f"{stage}: exit status {status}: {script.last_line}")
            return status or 1
    return 0


def is_done(place: Place, stage: str) -> bool:
    """Whether the stage's record says that it is done: exit statuses alone do not."""
    program = (
        "import sys; from pathlib import Path; from hyperpod_ft.runs.run import Run;"
        " run = Run.open(Path(sys.argv[1])); sys.exit(not run.is_done(sys.argv[2]))"
    )
    return _python(place, "-c", program, str(place.run_directory), stage) == 0


def follow(place: Place, stop: Stop) -> int:
    """Run the scripts that the first host asks for, until it says that the job is over."""

    def start(stage: str, given: Mapping[str, str]) -> subprocess.Popen[bytes]:
        script = Script(_script(place, stage), stage, given)
        stop.watch(script)
        return script.process

    return step.follow(place["job"], place.hosts[0], place.number, start, stop.expired)


def _script(place: Place, stage: str) -> Path:
    return place.run_directory / "sbatch" / f"{stage}.sbatch"


def _log(place: Place, stage: str) -> Path:
    """Where Slurm would have written what the job prints: `Run.log`."""
    name = place.run_directory.parent.name
    return place.run_directory / "logs" / f"{name}-{stage}_{place['job']}.out"


def _python(place: Place, *arguments: str) -> int:
    environment = {**os.environ, "PYTHONPATH": str(ML / "input/data" / CODE)}
    return subprocess.run([place["python"], *arguments], env=environment, check=False).returncode


def main() -> None:
    sys.exit(init.run_as_child(work))


if __name__ == "__main__":
    main()
