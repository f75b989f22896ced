"""torchrun, but its ranks are forks of it: all is imported once, not by each rank, which takes seconds.

They are forked before torchrun starts threads: a lock that a thread holds would stay locked in a fork. Each waits until
torchrun starts it.

    python -m forking_torchrun [torchrun's options] -m MODULE ARGUMENT...

The agent, its ranks and their environment are torchrun's. tests/slurm uses torchrun as it is.
"""

from hyperpod_ft import gc_pause

if __name__ == "__main__":
    gc_pause.pause_collection()

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch.distributed.run
from numpy.typing import NDArray
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from hyperpod_ft.engines.batches import Batch, PackedSplit
from hyperpod_ft.engines.interface import TrainingProgress
from hyperpod_ft.engines.metrics import MetricsLog
from hyperpod_ft.job import torchrun as job_torchrun
from hyperpod_ft.processes import die_with_parent
from hyperpod_ft.runs import job_files
from tests.forking import fork_module


class WaitingRanks:
    """Forks that each become a rank, in the order in which torchrun starts its ranks."""

    def __init__(self, count: int, arguments: list[str]) -> None:
        """`arguments`: of `python -m`, the same for every rank."""
        self.waiting: list[tuple[int, Connection]] = []
        for _ in range(count):
            begins, begin = Pipe(duplex=False)
            pid = fork_module(arguments, partial(self._wait, begins, begin))
            begins.close()
            self.waiting.append((pid, begin))

    def _wait(self, begins: Connection, begin: Connection) -> None:
        """In the fork: wait for the rank's environment; end with torchrun."""
        for connection in (begin, *(other for _, other in self.waiting)):
            connection.close()
        try:
            environment = begins.recv()
        except EOFError:
            os._exit(0)
        os.environ.clear()
        os.environ.update(environment)
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if step := environment.get("HELD_AFTER_STEP"):
            hold_after(int(step))
        if (name := environment.get("HANGS")) and environment["RANK"] == "1":
            hang_after(3, HANGS[name])

    def start(self, _: tuple[str, ...], env: dict[str, str]) -> "StartedRank":
        """Stands in for `SubprocessHandler._popen`."""
        pid, begin = self.waiting.pop(0)
        with begin:
            begin.send(env)
        return StartedRank(pid)


def hold_after(step: int) -> None:
    """Let the rank that writes metrics wait after that step, and so all, until a signal has come that it handles."""
    came, note = os.pipe()
    os.set_blocking(note, False)
    signal.set_wakeup_fd(note)
    write = MetricsLog.write

    def write_and_wait(log: MetricsLog, progress: TrainingProgress, *rest: Any, **named: Any) -> None:
        write(log, progress, *rest, **named)
        if progress.step == step:
            os.read(came, 1)

    MetricsLog.write = write_and_wait  # type: ignore[method-assign]


def hang_after(step: int, begin: Callable[[], object]) -> None:
    """Let this rank call `begin` after that step."""
    advance = MetricsLog.advance

    def advance_and_hang(log: MetricsLog, progress: TrainingProgress, *rest: Any, **named: Any) -> TrainingProgress:
        progress = advance(log, progress, *rest, **named)
        if progress.step == step:
            begin()
        return progress

    MetricsLog.advance = advance_and_hang  # type: ignore[method-assign]


def skip_a_collective() -> None:
    """Leave the next all-reduce over all ranks to the others."""
    all_reduce = torch.distributed.all_reduce

    def skip(tensor: torch.Tensor, **named: Any) -> None:
        if named:  # of a group
            all_reduce(tensor, **named)
        else:
            torch.distributed.all_reduce = all_reduce

    torch.distributed.all_reduce = skip


def read_what_nobody_writes() -> None:
    """Have the next micro batch read a named pipe."""

    def read(split: PackedSplit, rows: NDArray[np.int64]) -> Batch:
        with tempfile.TemporaryDirectory() as directory:
            os.mkfifo(f"{directory}/input_ids.npy")
            return np.load(f"{directory}/input_ids.npy")  # type: ignore[no-any-return]

    PackedSplit.batch = read  # type: ignore[method-assign]


def share_a_core() -> None:
    """Stay on one core, which two other processes want all the time; where all cores are busy, it gets the least."""
    rank = os.getpid()
    os.sched_setaffinity(rank, {max(os.sched_getaffinity(rank))})
    for _ in range(2):
        if not os.fork():
            die_with_parent(rank, signal.SIGKILL)
            while True:
                pass
    os.nice(2)


HANGS = {
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "deadlock": skip_a_collective,
    "read": read_what_nobody_writes,
    "slow": share_a_core,
}


class StartedRank(subprocess.Popen[bytes]):
    """A rank: what torchrun would start as `python -u -m MODULE ARGUMENT...`."""

    def _execute_child(self, pid: int, *rest: Any) -> None:
        self.pid = pid
        self._child_created = True


if __name__ == "__main__":
    gc_pause.resume_collection()
    options = torch.distributed.run.parse_args(sys.argv[1:])
    ranks = WaitingRanks(int(options.nproc_per_node), [options.training_script, *options.training_script_args])
    subprocess_handler.SubprocessHandler._popen = staticmethod(ranks.start)  # type: ignore[assignment]
    # It names the caller for events, which are not recorded here. With thousands of imported modules, finding that name
    # takes half a second a launch.
    dynamic_rendezvous.get_method_name = lambda depth=2: "rendezvous"
    if job_files.ATTEMPT_DIRECTORY in os.environ:  # a supervisor expects the job's own
        sys.exit(job_torchrun.main())
    torch.distributed.run.main()
