"""A rank that says what it finds, and then does as its number says (test_forked_ranks.py).

python -m hyperpod_ft.job.torchrun ... --preload=MODULE -m forked_worker DIRECTORY MODE
"""

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import torch

_NOTICED: list[int] = []


def run() -> int:
    directory, mode = Path(sys.argv[1]), sys.argv[2]
    rank, server = os.environ["RANK"], os.getppid()
    signal.signal(signal.SIGUSR1, lambda number, _: _NOTICED.append(number))
    *_, error_file = vars(multiprocessing.current_process())["_args"]  # that torch unpickles when this rank has failed
    found = {
        "pid": os.getpid(),
        "server": server,
        "threads of the server": len(list(Path(f"/proc/{server}/task").iterdir())),
        "cuda": torch.cuda.is_initialized() or bool(torch.cuda._is_in_bad_fork()),  # type: ignore[no-untyped-call]
        "imported": sorted({"torch", "transformers", "trl", "peft"} & set(sys.modules)),
        "variables": sorted({"JE_ARROW_MALLOC_CONF", "PYTORCH_NVML_BASED_CUDA_CHECK"} & set(os.environ)),
        "error file": error_file,
    }
    partial = directory / f"partial-{rank}"
    partial.write_text(json.dumps(found))
    partial.rename(directory / f"rank-{rank}.json")
    if mode == "notice":
        while not _NOTICED:
            time.sleep(0.01)
        (directory / f"noticed-{rank}").touch()
    elif mode == "statuses":
        while len(list(directory.glob("rank-*.json"))) < 2:
            time.sleep(0.01)
        if rank == "0" and not (directory / "outlived").exists():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (directory / "outlived").touch()
            time.sleep(300)
        while not (directory / "outlived").exists():
            time.sleep(0.01)
        return 1 if rank == "0" else 7
    elif mode == "done":
        return 0
    elif mode == "rank 0 fails once":
        if rank == "1" or (directory / "failed").exists():
            print("again" if (directory / "failed").exists() else "done", flush=True)
            return 0
        (directory / "failed").touch()
        return 7
    time.sleep(300)
    return 0
