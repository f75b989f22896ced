"""A stand-in for AWS that fails ends what uses it, which would wait for minutes, with its traceback."""

import re
import subprocess
import sys
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path

import pytest

from tests.aws.kit import ROOT

# Importing what stands in for AWS has taken minutes on a busy machine whose disk was cold.
pytestmark = pytest.mark.timeout(900)

# a server whose every request meets a bug
_WITH_A_BUG = """
from tests.aws import server

class WithABug(server.Server):
    def __call__(self, *_):
        return [][0]

server.Server = WithABug
server.main()
"""


_DELETED_WHILE_LISTED = """
import moto.s3.utils
from tests.aws import server

server._list_keys_as_they_were()
for listing in ("items", "values", "lists"):
    keys = moto.s3.utils._VersionedKeyStore()
    keys["kept"], keys["deleted"] = 1, 2
    listed = getattr(keys, listing)()
    next(listed)
    del keys["deleted"]
    print(listing, *listed)
"""


def test_keys_that_are_deleted_while_they_are_listed_are_listed() -> None:
    found = subprocess.run(
        [sys.executable, "-c", _DELETED_WHILE_LISTED], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.stdout == "items ('deleted', 2)\nvalues 2\nlists ('deleted', [2])\n", found.stderr


def test_a_bug_ends_it_with_its_traceback() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _WITH_A_BUG],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout and process.stderr
        endpoint = process.stdout.readline().strip()
        with pytest.raises((HTTPException, OSError)):
            urllib.request.urlopen(f"{endpoint}/_test/requests", timeout=300)
        assert process.wait(300) == 1
        assert re.search(r"Traceback.*IndexError", process.stderr.read(), re.DOTALL)


def test_the_test_that_uses_it_fails(tmp_path: Path) -> None:
    (tmp_path / "test_waiting.py").write_text(
        "import os, signal, time\n"
        "from hyperpod_ft.processes import children\n"
        "def test_waits(aws):\n"
        "    os.kill(children(os.getpid())[0], signal.SIGKILL)\n"
        "    time.sleep(1000)\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "tests.aws.conftest", "-p", "no:cacheprovider"]
    command += [f"--rootdir={tmp_path}", str(tmp_path)]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout + done.stderr
    assert "the server that stands in for AWS has ended" in done.stdout


def test_a_rehearsal_ends(tmp_path: Path) -> None:
    """Whatever it waits for: an answer that does not come is no reason to wait for AWS."""
    script = tmp_path / "rehearse.sh"
    script.write_text(
        f"set -Eeuo pipefail; cd {ROOT}; source scripts/setup.sh; source scripts/stand_in.sh\n"
        'start_stand_in 1; (sleep 2; kill -KILL "$stand_in") & run sleep 1000\n'
    )
    command = ["bash", script]
    done = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=800)
    assert done.returncode == 2 and "the stand-in for AWS has ended" in done.stderr, done.stderr
