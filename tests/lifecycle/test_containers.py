"""The machines of these tests: apart from one another and from this one, and gone when the test is, however it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hyperpod_ft.processes import ProcessIdentity, children, descendants
from tests.lifecycle.instances import CONTROLLER, FSX_SOURCE, WORKERS
from tests.lifecycle.nodes import container
from tests.waiting import wait_for

pytestmark = pytest.mark.lifecycle

OWNER = """
import sys, time
from pathlib import Path
from tests.lifecycle.instances import CONTROLLER
from tests.lifecycle.nodes import container
with container(Path(sys.argv[1])) as opened:
    node = opened.power_on(CONTROLLER, [CONTROLLER])
    escaped = node.start("setsid", "sleep", "600")
    print("up", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_however_the_owner_ends(nodes_possible: None, tmp_path: Path, number: signal.Signals) -> None:
    words = [sys.executable, "-c", OWNER, str(tmp_path)]
    # From the repository, where `tests` is found.
    owner = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert owner.stdout is not None
    assert owner.stdout.readline() == "up\n"
    # the node's own processes come and go, while its children stay
    keeper = next(pid for pid in children(owner.pid) if b"container.sh" in Path(f"/proc/{pid}/cmdline").read_bytes())
    group = f"hyperpod-ft-container-{keeper}"
    processes = [identity for pid in descendants(owner.pid) if (identity := ProcessIdentity.of(pid))]
    assert len(processes) > 8  # systemd, journald, munged, sshd, ...
    assert _groups(group)

    owner.send_signal(number)
    owner.wait(300)
    owner.stdout.close()

    wait_for(lambda: not any(each.is_alive() for each in processes) and not _groups(group), 300, every=0.1)
    assert not list(tmp_path.iterdir())


def test_nodes_are_machines_of_their_own(nodes_possible: None, tmp_path: Path) -> None:
    cluster = [CONTROLLER, WORKERS[0]]
    with container(tmp_path) as opened:
        one, other = (opened.power_on(instance, cluster) for instance in cluster)
        one.run("useradd", "--uid", "4711", "someone")
        assert one.run("id", "-u", "someone").stdout.strip() == "4711"
        assert other.run("id", "someone", check=False).returncode != 0
        assert "someone" not in Path("/etc/passwd").read_text()
        assert (one.changes / "etc/passwd").exists()

        assert one.run("hostname").stdout.strip() == CONTROLLER.hostname
        assert os.uname().nodename != CONTROLLER.hostname
        interfaces = one.run("ip", "-brief", "address").stdout
        assert CONTROLLER.address in interfaces
        # No way out, and what has no namespace is read-only.
        reached = one.run("timeout", "5", "bash", "-c", "exec 3<>/dev/tcp/192.0.2.1/80", check=False)
        assert reached.returncode != 0
        assert one.run("sh", "-c", "echo 1 > /proc/sys/vm/overcommit_memory", check=False).returncode != 0

        one.run("systemd-run", "--unit", "listener", "python3", "-m", "http.server", "8000")
        words = (
            "curl",
            "--silent",
            "--retry",
            "300",
            "--retry-connrefused",
            "--retry-delay",
            "1",
            "--output",
            "/dev/null",
        )
        other.run(*words, f"http://{CONTROLLER.hostname}:8000/")

        mounting = f"mkdir /fsx && mount -t lustre {FSX_SOURCE} /fsx"
        one.run("sh", "-c", f"{mounting} && echo shared > /fsx/file")
        assert other.run("sh", "-c", f"{mounting} && cat /fsx/file").stdout == "shared\n"
        assert one.run("sh", "-c", "mkdir /x && mount -t lustre other@tcp:/fs /x", check=False).returncode != 0
    assert not list(tmp_path.iterdir())


def _groups(name: str) -> list[Path]:
    """The control groups of a container, wherever version 2 of them is mounted."""
    mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    return [Path(fields[1], name) for fields in mounts if fields[2] == "cgroup2" and Path(fields[1], name).exists()]
