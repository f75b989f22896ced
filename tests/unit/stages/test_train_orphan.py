"""A rank whose torchrun was killed."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

from hyperpod_ft.runs.run import Run

MakeRun = Callable[..., Run]


def test_a_rank_ends_with_its_torchrun(make_run: MakeRun) -> None:
    """Otherwise it may join the next attempt, and the new rank of its number waits forever."""
    run = make_run()
    run.freeze()
    with socket.create_server(("127.0.0.1", 0)) as store:
        store.settimeout(120)
        environment = {
            "RANK": "1",
            "WORLD_SIZE": str(run.plan.degrees.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RUN_ID": "none",
        }
        environment |= {"TORCHELASTIC_RESTART_COUNT": "0", "LOCAL_RANK": "1"}
        environment |= {"MASTER_PORT": str(store.getsockname()[1]), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        rank = f"{sys.executable} -m hyperpod_ft.stages.train '{run.paths.directory}'"
        with subprocess.Popen(["bash", "-c", f"{rank} & wait"], env=os.environ | environment) as torchrun:
            connection, _ = store.accept()  # the rank is at work, and waits for the answer
            torchrun.send_signal(signal.SIGKILL)
        with connection:
            connection.settimeout(30)
            while connection.recv(1 << 16):  # the kernel closes it when the rank is gone
                pass
