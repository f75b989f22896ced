"""PID 1 of a container."""

import os
import signal
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[4]

# Its child says what it is, and what signal it got; an orphan of the child ends while PID 1 waits.
PROGRAM = """
import os, signal, subprocess, sys, time
from hyperpod_ft.sagemaker.container.entry import run_as_child
def work():
    got = []
    signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    subprocess.run(["bash", "-c", "(sleep 0.2; exit 9) & exit 0"], check=True)
    print("ready", flush=True)
    while not got:
        time.sleep(0.02)
    deadline = time.monotonic() + 200
    while (left := os.popen("ps -o stat= --ppid 1").read().split())[1:] and time.monotonic() < deadline:
        time.sleep(0.1)  # the orphan ends
    print(got, left[1:], flush=True)
    return 5
sys.exit(run_as_child(work))
"""


def test_signals_go_to_the_work_and_orphans_are_reaped() -> None:
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    process = subprocess.Popen(
        ["unshare", *user, "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    (pid1,) = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    os.kill(pid1, signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert output == f"[{int(signal.SIGTERM)}] []\n" and process.returncode == 5


def test_the_status_is_the_works() -> None:
    for work, status in (("0", 0), ("3", 3), ("os.kill(os.getpid(), 9)", 137), ("1 / 0", 1)):
        program = "import os, sys; from hyperpod_ft.sagemaker.container.entry import run_as_child;"
        program += f" sys.exit(run_as_child(lambda: {work}))"
        done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, check=False)
        assert done.returncode == status, work
