"""provision.sh: its log and its exit status when the program fails, hangs or cannot run."""

from __future__ import annotations

import time

from tests.lifecycle.nodes import SCRIPTS, Node
from tests.programs import write_program


def test_a_failure_is_in_the_log_before_the_script_ends(node: Node) -> None:
    node.path(f"{SCRIPTS}/settings.json").write_text("{}")
    started = time.monotonic()
    done = node.provision(environment={"PROVISION_FAILURE_WAIT_SECONDS": "1"}, check=False)
    assert done.returncode == 2
    assert time.monotonic() - started >= 1
    log = node.path("/var/log/provision/provisioning.log").read_text()
    assert "settings.json: 'version' is missing" in log
    assert "failed with exit status 2" in log


def test_what_a_dead_file_system_holds_does_not_keep_the_script_from_ending(node: Node) -> None:
    """A process that left its group stands in for one that the kernel does not let go; its output is the script's.

    And a `sync` that hangs for one that waits for the dead file system.
    """
    (node.path(SCRIPTS) / "provision/__main__.py").write_text(
        "import subprocess, sys\n"
        "subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "sys.exit('fsx: failed: not done after 300 s')\n"
    )
    write_program(node.path("/usr/local/bin/sync"), '[ -n "$1" ] || exec sleep 300')
    started = time.monotonic()
    done = node.provision(environment={"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, check=False)
    assert time.monotonic() - started < 30
    assert done.returncode == 1
    log = node.path("/var/log/provision/provisioning.log").read_text()
    assert "not done after 300 s" in log
    assert "failed with exit status 1" in log


def test_a_node_without_python_says_so(node: Node) -> None:
    for name in ("bash", "sed", "head", "getent", "tee", "date", "mkdir", "dirname", "sync", "sleep"):
        node.run("bash", "-c", f"mkdir -p /tmp/bin; ln -s $(command -v {name}) /tmp/bin/{name}")
    node.run("bash", "-c", "rm -f /usr/bin/python3")
    done = node.provision(environment={"PATH": "/tmp/bin:/usr/sbin"}, check=False)
    assert done.returncode == 1
    assert "no Python 3.8 or newer on this node" in done.stdout
