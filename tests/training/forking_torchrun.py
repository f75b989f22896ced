"""torchrun, but its ranks are forked from it: all is imported once, not by each rank, which takes seconds.

    python -m forking_torchrun [torchrun's options] -m MODULE ARGUMENT...

The agent, its ranks and their environment are torchrun's. tests/slurm uses torchrun as it is.
"""

from hyperpod_ft import gc_pause

if __name__ == "__main__":
    gc_pause.pause_collection()

import os
import signal
import subprocess
from typing import Any

import torch.distributed.run
import transformers.models.llama.modeling_llama  # noqa: F401 - for the ranks, as what follows
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

import hyperpod_ft.engines.torch.loop
import hyperpod_ft.stages.train  # noqa: F401
from tests.forking import fork_module


class ForkedRank(subprocess.Popen[bytes]):
    """A rank: what torchrun would start as `python -u -m MODULE ARGUMENT...`."""

    def _execute_child(self, args: tuple[str, ...], *rest: Any) -> None:
        self.pid = fork_module(args[args.index("-m") + 1 :], become_a_rank)
        self._child_created = True


def become_a_rank() -> None:
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # torchrun's own are not for its ranks
    signal.signal(signal.SIGINT, signal.default_int_handler)


def fork(handler: subprocess_handler.SubprocessHandler, args: tuple[str, ...], env: dict[str, str]) -> ForkedRank:
    """Stands in for `SubprocessHandler._popen`."""
    own = dict(os.environ)
    os.environ.update(env)  # inherited by the fork
    try:
        return ForkedRank(args)
    finally:
        os.environ.clear()
        os.environ.update(own)


if __name__ == "__main__":
    subprocess_handler.SubprocessHandler._popen = fork  # type: ignore[method-assign]
    # It names the caller for events, which are not recorded here. With thousands of imported modules, finding that name
    # takes half a second a launch.
    dynamic_rendezvous.get_method_name = lambda depth=2: "rendezvous"
    gc_pause.resume_collection()
    torch.distributed.run.main()
