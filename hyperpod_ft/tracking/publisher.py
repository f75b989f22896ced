"""The process that holds one tracker's package, and publishes what it is sent.

    python -m hyperpod_ft.tracking.publisher TRACKER      with the interpreter that has the package

One JSON object a line: requests on stdin, answers on stdout, as publisher_process.py sends and reads them. The tracker
prints to stderr. Imports nothing but the standard library and the tracker's package: it has no other.
"""

import importlib
import json
import os
import signal
import sys
from typing import Any

from hyperpod_ft.processes import die_with_parent
from hyperpod_ft.tracking.trackers.interface import TrackerRun

_MODULES = {
    "tensorboard": "event_files",
    "wandb": "wandb_runs",
    "mlflow": "mlflow_runs",
    "trackio": "trackio_runs",
}


def main(tracker: str) -> int:
    """Answer requests until stdin ends; returns the exit status."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # Slurm signals every process of a job; the follower says when to end
    if sys.platform == "linux":
        die_with_parent(os.getppid(), signal.SIGKILL)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    run: TrackerRun | None = None
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        try:
            if "open" in request:
                module = importlib.import_module(f"hyperpod_ft.tracking.trackers.{_MODULES[tracker]}")
                run = module.open_run(request["open"])
                answer: dict[str, Any] = {"step": run.step(), "where": run.where}
            else:
                assert run is not None
                answer = _perform(run, request)
        except Exception as error:  # whatever it is, the follower tries again later
            answer = {"problem": _explain(tracker, error)}
        print(json.dumps(answer), file=answers, flush=True)
        if "problem" in answer:
            return 1
    return 0


def _perform(run: TrackerRun, request: dict[str, Any]) -> dict[str, Any]:
    if "rows" in request:
        run.publish(request["rows"])
    elif "final" in request:
        run.publish_final(request["final"], request["step"])
    else:
        run.end(request["end"])
    return {}


def _explain(tracker: str, error: Exception) -> str:
    if isinstance(error, ImportError):
        return f"{sys.executable} cannot import {tracker}: {error}"
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}"[:300]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
