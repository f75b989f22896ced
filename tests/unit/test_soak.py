"""The library with which the soak has files fail and clocks jump."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.soaking.shim import OPERATIONS, Shim, build

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
