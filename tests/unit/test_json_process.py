"""Programs that answer lines of JSON."""

import os
import signal
import sys

import pytest

from hyperpod_ft.processes import JsonProcess

# A child that keeps the output open, as one of multiprocessing's does, outlives the program.
LEAVES_A_CHILD = """
import os, sys, time
sys.stdin.readline()
if child := os.fork():
    sys.stdout.write('{"child": %d}\\n' % child)
    sys.stdout.flush()
    sys.stdin.readline()
    os._exit(3)
os.close(0)
time.sleep(600)
"""


def test_a_program_that_ended_is_noticed_although_its_child_holds_its_output() -> None:
    process = JsonProcess([sys.executable, "-c", LEAVES_A_CHILD], os.environ)
    child = process.ask({}, lambda: None)["child"]
    waits = []

    def wait() -> None:
        waits.append(1)
        if len(waits) > 600:
            pytest.fail("nobody noticed for a minute")

    try:
        with pytest.raises(EOFError):
            process.ask({}, wait)
        with pytest.raises(EOFError):
            process.ask({}, wait)
    finally:
        os.kill(child, signal.SIGKILL)
        assert process.kill() == 3
