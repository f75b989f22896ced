"""What runs in each container of a training job: the stages of its group, one after the other.

It is part of the copy of the kit's code that `start.py` has verified.

The first host runs the stages' scripts, the same ones that Slurm runs; the others do what it tells them when ranks
start. At its end it creates the run's next training job. Exit status: 0 when every stage has left its record,
whatever its processes did afterwards. What the launcher tells a container are hyperparameters (host.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Callable, Mapping

from hyperpod_ft.environments import image_interpreter
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs import job_files
from hyperpod_ft.runs.job_files import ATTEMPT_DIRECTORY, MAX_RUNTIME, NOTICE_STATUS, TERMINATED_STATUS, notice_seconds
from hyperpod_ft.sagemaker.container import drivers, messages, on_every_host
from hyperpod_ft.sagemaker.container.command_client import ContainerCommands
from hyperpod_ft.sagemaker.container.host import FSX, ML, VERIFIED_CODE, ContainerHost, link_root, write_failure_reason
from hyperpod_ft.sagemaker.container.on_every_host import STORE, serve_first_host
from hyperpod_ft.sagemaker.container.script import TRAINING_STAGE, Script, Stop

# The instance's fastest disk, which a container has for itself.
SCRATCH = Path("/tmp/hyperpod-ft")  # noqa: S108
PYTHON = Path("/tmp/hyperpod-ft-python/bin/python")  # noqa: S108
JOB_ARN = "TRAINING_JOB_ARN"  # with the job's name all that SageMaker is documented to set
_DISMISS_SECONDS = 5
# Of a job after which another may come: all is done, or its time is over. After any other status, a stage has failed.
_ANOTHER_MAY_FOLLOW = (0, NOTICE_STATUS)
_FORWARDED = (signal.SIGTERM, signal.SIGINT)


def run_as_child(work: Callable[[], int]) -> int:
    """What PID 1 does: run `work` in a child, forward SIGTERM to it, and reap every orphaned process.

    The kernel gives PID 1 every orphan of the container, and delivers to it only the signals that it handles. Returns
    the child's exit status, 128 + N for signal N. Other processes end with the container.
    """
    # blocked until the handlers are there: the first signal must not be lost
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    child = os.fork()
    if child == 0:
        for number in _FORWARDED:
            signal.signal(number, signal.SIG_DFL)  # not what start.py or Python does with it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        status = 1
        try:
            status = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    for number in _FORWARDED:
        signal.signal(number, lambda received, _: os.kill(child, received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    while True:
        pid, ended = os.wait()
        if pid == child:
            return os.WEXITSTATUS(ended) if os.WIFEXITED(ended) else 128 + os.WTERMSIG(ended)


def work() -> int:
    """What the child of PID 1 does; returns the container's exit status."""
    try:
        host = ContainerHost.read()
        stop = Stop(notice_after(int(host.parameters.max_runtime)))
        host.wait_for_names()
        link_root(Path(host.parameters.root), SCRATCH if host.parameters.store else ML / "input/data" / FSX)
        python = PYTHON if host.parameters.pins else Path(host.parameters.python)
        commands = ContainerCommands(host, str(python))
        prepare(host, commands, python)
        if host.is_first:
            commands.refuse_cancelled()
        count_earlier_containers(host, commands, stop)
        return run_as_first(host, commands, stop) if host.is_first else run_as_other(host, commands, stop)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        write_failure_reason(str(error))
        return 1
    except Exception as error:  # a bug: its traceback is in the log
        write_failure_reason(repr(error))
        raise


def prepare(host: ContainerHost, commands: ContainerCommands, python: Path) -> None:
    """Make the interpreter, look at drivers, and pull the run. Raises UserError: the first stage has failed then."""
    try:
        image_interpreter.prepare(python, host.parameters.pins, Path(VERIFIED_CODE))
        drivers.look(python, host.parameters.pins, VERIFIED_CODE)
        os.environ.update(variables(host, python))
        commands.pull_run()
    except UserError:
        if host.is_first:
            leave_exit_status(host, host.parameters.stages.split()[0], 1)
            commands.push_state()
        raise


def count_earlier_containers(host: ContainerHost, commands: ContainerCommands, stop: Stop) -> None:
    """Give the notice, and time to save, by what is left of the job's limit: it is one for all of its attempts."""
    used = commands.seconds_used()
    if used is not None:
        left = max(1, int(host.parameters.max_runtime) - round(used))
        os.environ[MAX_RUNTIME] = str(left)
        stop.notice_in(notice_after(left))
        print(f"{left} s of the job's time limit are left", flush=True)


def notice_after(max_runtime: int) -> float:
    """When the training gets its notice, in seconds, of which the container has `max_runtime`."""
    return max_runtime - notice_seconds(max_runtime)


def variables(host: ContainerHost, python: Path) -> dict[str, str]:
    """What the scripts and their programs find in their environment, besides what they set themselves."""
    found = {
        "PYTHONPATH": VERIFIED_CODE,
        "HYPERPOD_FT_CODE": VERIFIED_CODE,
        job_files.PYTHON: str(python),
        job_files.JOB_ID: host.parameters.job,
        MAX_RUNTIME: host.parameters.max_runtime,
        job_files.HOSTS: " ".join(host.hosts),
        job_files.HOST_NUMBER: str(host.number),
        job_files.ON_EVERY_HOST: on_every_host.__name__,
    }
    if "AWS_REGION" not in os.environ and JOB_ARN in os.environ:
        found["AWS_REGION"] = os.environ[JOB_ARN].split(":")[3]
    if host.parameters.store:
        found[STORE] = host.parameters.store
    if host.interface:
        found.update({"NCCL_SOCKET_IFNAME": host.interface, "GLOO_SOCKET_IFNAME": host.interface})
    return found


def run_as_first(host: ContainerHost, commands: ContainerCommands, stop: Stop) -> int:
    """Run the stages, dismiss the other hosts, and have the next training job created, if one may follow."""
    status, missing = 1, 0
    try:
        status = run_stages(host, commands, stop)
    finally:
        # also when nothing else could be pushed: whoever looks at the run from outside sees that a stage has failed
        commands.push_state()
        # the others may still install packages; when this one fails, SageMaker ends them
        seconds = _DISMISS_SECONDS if status or stop.requested else messages.JOIN_SECONDS
        missing = len(host.hosts) - 1 - messages.dismiss(host.parameters.job, host.hosts, seconds)
    # not when it was cancelled, or SageMaker starts this job again
    if status == 0 or (status in _ANOTHER_MAY_FOLLOW and not stop.requested):
        commands.advance()
    if status == 0 and missing and not stop.requested:
        # it would wait for this host until the job's time is over, and all instances are billed meanwhile
        write_failure_reason(
            f"every stage is done, but {missing} of the other hosts did not come within {seconds:.0f} s"
        )
        return 1
    return status


def run_stages(host: ContainerHost, commands: ContainerCommands, stop: Stop) -> int:
    """Run the stages until one has left no record; returns the exit status."""
    wanted = host.parameters.stages.split()
    # with a store, each container checks its own environment
    own = [] if "env" in wanted or commands.is_done("env") else ["env"]
    for stage in [*own, *wanted]:
        if stop.requested:
            return TERMINATED_STATUS
        if stop.noticed and stage == TRAINING_STAGE:
            return NOTICE_STATUS
        try:
            status = run_stage(host, commands, stop, stage)
            if status == 0 and stage in wanted:
                commands.after(stage)
        except UserError:
            if not stop.requested:  # else SageMaker may start this job again
                leave_exit_status(host, stage if stage in wanted else wanted[0], 1)
            raise
        if status:
            if stage in own and not stop.requested:
                leave_exit_status(host, wanted[0], status)  # the job is for this stage, which cannot begin
            return status
    return 0


def run_stage(host: ContainerHost, commands: ContainerCommands, stop: Stop, stage: str) -> int:
    """Run a stage with what it needs from the store; returns 0 if it has left its record, else an exit status."""
    commands.before(stage)
    with commands.during(stage):
        log = job_files.log(host.run_directory, stage, host.parameters.job)
        script = Script(job_files.script(host.run_directory, stage), stage, {}, log=log)
        status = script.wait(stop)
    if commands.is_done(stage):
        return 0
    write_failure_reason(script.error or f"{stage}: exit status {status}: {script.last_line}")
    return status or 1


def leave_exit_status(host: ContainerHost, stage: str, status: int) -> None:
    """Do what a stage's script does at its end, for one that did not start or was not what failed."""
    marker = job_files.exit_marker(host.run_directory, stage, host.parameters.job)
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.write_text(f"{status}\n", encoding="utf-8")


def run_as_other(host: ContainerHost, commands: ContainerCommands, stop: Stop) -> int:
    """Run the scripts that the first host asks for, until it says that the job is over."""

    def start(stage: str, given: Mapping[str, str]) -> subprocess.Popen[bytes]:
        Path(given[ATTEMPT_DIRECTORY]).mkdir(parents=True, exist_ok=True)
        script = Script(job_files.script(host.run_directory, stage), stage, given)
        stop.watch(script)
        return script.process

    commands.before(host.parameters.stages.split()[0])  # while the first host does the same
    with commands.during(TRAINING_STAGE):
        return serve_first_host(host.parameters.job, host.hosts[0], host.number, commands.before, start, stop.expired)


def main() -> None:
    sys.exit(run_as_child(work))


if __name__ == "__main__":
    main()
