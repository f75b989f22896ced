"""A tuned run, as consolidate, merge and generate leave it, and its server as `hyperpod-ft serve` starts it."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from hyperpod_ft.runs.run import Run
from tests.unit.serving import tuned


@pytest.fixture(scope="session")
def tuned_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tuned.make(tmp_path_factory.mktemp("tuned"))


@dataclass
class Serving:
    """A started `hyperpod-ft serve`. `printed`: its first lines."""

    process: "subprocess.Popen[str]"
    url: str
    printed: list[str]


def serve(*arguments: str, **environment: str) -> Serving:
    """Start it on a free port, and wait until it answers."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hyperpod_ft", "serve", *arguments, "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )
    printed = []
    assert process.stdout is not None
    for line in process.stdout:
        printed.append(line.rstrip("\n"))
        if line.startswith("Stop:"):
            break
    found = re.search(r"(?<=curl )http://[^/]+", "\n".join(printed))
    assert found, printed
    return Serving(process, found[0], printed)


@pytest.fixture(scope="session")
def serving(tuned_run: Run) -> Iterator[Serving]:
    """The run's server with base, tuned and the adapter by name."""
    started = serve(str(tuned_run.paths.directory), "--adapter", f"mine={tuned_run.paths.adapter}")
    yield started
    started.process.terminate()
    assert started.process.wait(300) == 0
