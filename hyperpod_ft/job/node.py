"""The program that a job runs on each of its nodes: the health check, then one torchrun that starts the node's ranks.

    python -m hyperpod_ft.job.node RUN_DIR [--precompile]

In a Slurm job step, and in a SageMaker training job, the torchruns of all nodes meet at the first node. Elsewhere every
rank runs on this machine.
With `--precompile` the ranks run a trial (stage precompile), with engine neuron under `neuron_parallel_compile`.
"""

import errno
import os
import shlex
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.errors import EXIT_USER_ERROR, UserError, print_error, volume_failure
from hyperpod_ft.job.health import EFA_PLUGIN, nccl_uses_efa
from hyperpod_ft.job.job_host import MASTER_PORTS, JobHost, this_host
from hyperpod_ft.planning.engine_rules import module_of, rules_of
from hyperpod_ft.runs.job_files import shell_status
from hyperpod_ft.runs.jobs import job_python
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import RunPaths

_PRECOMPILE = "--precompile"


def torchrun_command(run: Run, rendezvous: list[str], node_rank: int, *, precompile: bool) -> list[str]:
    """The command line that starts this node's ranks."""
    command = [
        *(rules_of(run.config.engine).TRIAL_LAUNCHER if precompile else ()),
        *(str(job_python(run.paths)), "-m", "hyperpod_ft.job.torchrun"),
        *((f"--preload={module_of(run.config.engine)}",) if _forks_ranks(run) else ()),
        *((f"--check={shlex.join(check)}",) if (check := _check_command(run)) else ()),
        *rendezvous,
        f"--node-rank={node_rank}",
        # torchrun makes a directory for its ranks' error files and never removes it: in the run, not in /tmp
        f"--log-dir={run.paths.logs / 'torchrun'}",
        *("-m", "hyperpod_ft.stages.train", str(run.paths.directory)),
    ]
    return [*command, "--trial"] if precompile else command


def _check_command(run: Run) -> list[str]:
    """What checks this node before each attempt; empty where nothing is checked."""
    if not run.config.instance.has_accelerators and run.plan.degrees.nodes == 1:
        return []
    return [str(job_python(run.paths)), "-m", "hyperpod_ft.job.health", str(run.paths.directory)]


def _forks_ranks(run: Run) -> bool:
    """Whether ranks are forks. Neuron's runtime, torch_xla and macOS's libraries do not promise to work in them."""
    return not run.config.instance.is_neuron and sys.platform == "linux"


def rendezvous(run: Run, host: JobHost) -> list[str]:
    """torchrun's options for the number of ranks and the place where its nodes meet."""
    degrees = run.plan.degrees
    if not (first := host.meeting_place()):
        # a free port, what `--standalone` stands for
        return ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--nproc-per-node={degrees.world_size}"]
    return [
        f"--nnodes={degrees.nodes}",
        f"--nproc-per-node={degrees.ranks_per_node}",
        f"--master-addr={first}",
        f"--master-port={master_port(run.paths, host)}",
    ]


def master_port(paths: RunPaths, host: JobHost) -> int:
    """The port of this attempt's rendezvous, the same on all its nodes.

    Each attempt has its own port. A rank left behind by an earlier attempt would otherwise join this one in place of
    the new rank with that number, which would then wait in init_process_group forever.
    """
    # the run's directory distinguishes clusters that share a host
    # a training job's hosts have their own network
    number = zlib.crc32(bytes(paths.directory)) + host.attempt_number
    return MASTER_PORTS[number % len(MASTER_PORTS)]


def main() -> None:
    """Check the node and become torchrun, or exit with the status of what kept it from starting."""
    directory, *options = sys.argv[1:]
    host = this_host()
    try:
        _start_ranks(Path(directory), host, precompile=options == [_PRECOMPILE])
    except UserError as error:
        print_error(host.name, str(error))
        # an I/O error of the volume is not the user's, and may pass: the ranks are started again after it
        passing = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EIO
        sys.exit(1 if passing else EXIT_USER_ERROR)
    except OSError as error:
        message, status = volume_failure(error)
        print_error(host.name, message)
        sys.exit(status)


def _start_ranks(directory: Path, host: JobHost, *, precompile: bool) -> None:
    run = Run.open(directory)
    if (check := _check_command(run)) and (status := subprocess.run(check, check=False).returncode):
        sys.exit(shell_status(status))
    try:
        meeting = rendezvous(run, host)
    except UserError as error:
        # exit status 1, not 2: the controller may answer later, so the job must not be given up
        print_error(host.name, str(error))
        sys.exit(1)
    memory = host.memory(run.paths.directory)
    if host.is_first_start and not host.attempt and publish.is_own_directory(memory.parent):
        shutil.rmtree(memory, ignore_errors=True)  # what an earlier job of the same id has left
    command = torchrun_command(run, meeting, host.number, precompile=precompile)
    first = rules_of(run.config.engine).program_directories(run.config, job_python(run.paths))
    os.environ["PATH"] = os.pathsep.join([*map(str, first), os.environ.get("PATH", os.defpath)])
    if nccl_uses_efa(run.config.instance, host.nodes):
        os.environ["NCCL_NET"] = EFA_PLUGIN
    os.execvp(command[0], command)  # noqa: S606 - no shell is meant


if __name__ == "__main__":
    main()
