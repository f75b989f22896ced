"""How the soak has files fail, clocks jump, and processes hang."""

import errno
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from benchmarks.soaking.faults import Fault, Faults
from benchmarks.soaking.shim import OPERATIONS, Shim, build
from benchmarks.soaking.site import Process
from hyperpod_ft.job.hang import STOPPED
from hyperpod_ft.processes import state
from tests.waiting import wait_for

_TRIES = """
import os, sys, time
failed = 0
for number in range(20):
    try:
        os.close(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT))
    except OSError as error:
        failed += 1
print(failed, round(time.time()))
"""


@pytest.mark.skipif(shutil.which("gcc") is None or sys.platform != "linux", reason="compiles a library for Linux")
def test_only_files_below_the_root_fail_and_one_node_has_another_time(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "code").mkdir(parents=True)
    shim = Shim(build(tmp_path), tmp_path / "control", root, root / "code")

    def tries(path: Path, node: str) -> list[int]:
        command = [sys.executable, "-S", "-c", _TRIES, str(path)]
        environment = os.environ | shim.environment | {"SLURMD_NODENAME": node}
        return [int(word) for word in subprocess.check_output(command, env=environment, text=True).split()]

    _, now = tries(root / "file", "node1")
    shim.fail(errno.EIO, 1_000_000, OPERATIONS)
    shim.set_clock("node1", -86_400)
    failed, yesterday = tries(root / "file", "node1")
    assert failed == shim.failed()["open"] == 20
    assert now - 86_400 <= yesterday < now - 86_000
    failed, today = tries(root / "code" / "file", "node2")
    assert failed == 0 and today >= now
    shim.fail(0, 0, ())
    assert tries(root / "file", "node2")[0] == 0


class Chosen(random.Random):
    """Chooses the fault of that name, and the shortest times."""

    fault = ""

    def choices(self, population: Any, *_: object, **__: object) -> list[Any]:
        return [each for each in population if each.__name__ == self.fault]

    def uniform(self, a: float, _: float) -> float:
        return a


@pytest.fixture
def rank() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "300"]) as process:
        yield process
        process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_only_a_rank_that_was_stopped_for_long_explains_a_hang(rank: "subprocess.Popen[bytes]") -> None:
    site = Mock(processes=lambda: [Process(rank.pid, "rank", "train")], jobs=list)
    logged: list[Fault] = []
    rng = Chosen(1)
    faults = Faults(site, rng, logged.append)
    rng.fault = "_slow_rank"
    faults.draw_mild()
    assert not faults.explain_hang()
    rng.fault = "_hang_rank"

    def hung() -> bool:
        faults.draw_mild()  # nothing until the other is over
        return len(logged) == 2

    wait_for(hung, what=lambda: str(logged))
    assert [fault.kind for fault in logged] == ["slow rank", "hung: rank"]
    wait_for(lambda: state(rank.pid) in STOPPED, what=lambda: f"process {rank.pid} runs")
    assert faults.explain_hang() and not faults.explain_hang()
