"""The soak's own parts: what it compares, what it counts, and the library that has files fail and clocks jump."""

import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.soaking import outcome, tally
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


def test_differences_name_the_place() -> None:
    expected = {"metrics": [{"step": 1, "loss": 2.5}], "files": {"merged/a": "x"}}
    assert outcome.differences(expected, {"metrics": [{"step": 1, "loss": 2.5}], "files": {"merged/a": "x"}}) == []
    found = {"metrics": [{"step": 1, "loss": 2.25}], "files": {}}
    assert outcome.differences(expected, found) == [
        "files/merged/a: x became None",
        "metrics/0/loss: 2.5 became 2.25",
    ]


def test_times_of_rows_are_not_compared() -> None:
    rows = [{"step": step, "loss": 1.0, "time": time.time() + step, "seconds": 0.1} for step in (1, 2)]
    assert outcome.without_times(rows) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 1.0}]


def test_entries_add_up_in_the_table() -> None:
    entry = {
        "started": "2026-11-22T21:00:00Z",
        "seed": 1,
        "commit": "abc",
        "seconds": 600,
        "runs": {"lora": 2},
        "faults": {"EIO": {"train": 3}, "kill -9: rank": {"train": 4, "merge": 1}},
        "failures": [],
    }
    page = tally.document(f"before\n{tally.BEGIN}\nold\n{tally.END}\nafter\n", [entry, entry | {"seed": 2}])
    assert page.startswith("before\n") and page.endswith("\nafter\n") and "old" not in page
    assert "**16 faults** in 4 whole runs (4 of `lora`)" in page
    row = next(line for line in page.splitlines() if line.startswith("| kill -9: rank |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")[1:]]
    assert dict(zip((*tally.STAGES, "in all"), cells, strict=True)) == dict.fromkeys(tally.STAGES, "") | {
        "train": "8",
        "merge": "2",
        "in all": "10",
    }


def test_entries_of_one_invocation_replace_each_other(tmp_path: Path) -> None:
    results = tmp_path / "soak.json"
    tally.save(results, {"started": "a", "runs": 1})
    tally.save(results, {"started": "b", "runs": 1})
    tally.save(results, {"started": "b", "runs": 2})
    assert tally.load(results) == [{"started": "a", "runs": 1}, {"started": "b", "runs": 2}]


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
