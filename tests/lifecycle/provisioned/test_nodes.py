"""Every step for real, on nodes made of namespaces: once, again, at the same time, and killed anywhere."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.lifecycle.cluster import snapshot
from tests.lifecycle.instances import CONTROLLER
from tests.lifecycle.nodes import SCRIPTS, Node
from tests.lifecycle.provisioned.provisioned_nodes import assert_right, node_number, nodes, outcomes
from tests.waiting import wait_for

# Of the system, or of pyenv.
_PYTHON_38 = next(
    (
        str(path.parent)
        for folder in (Path("/usr/bin"), *sorted(Path.home().glob(".pyenv/versions/3.8.*/bin")))
        if (path := folder / "python3.8").exists()
    ),
    None,
)


def test_twice_is_once(node: Node) -> None:
    first = outcomes(node.provision().stdout)
    assert first.pop("neuron") == "not needed"
    assert set(first.values()) == {"changed", "finished"}
    assert_right(node)
    before = snapshot(node)
    assert len(before) > 50
    second = outcomes(node.run("bash", "-c", f"cd / && {' '.join(node.provision_command())}").stdout)
    assert set(second.values()) == {"already so", "not needed", "finished"}
    assert snapshot(node) == before
    log = node.path("/var/log/provision/provisioning.log").read_text()
    assert log.count("provision: finished") == 3
    lines = [json.loads(line) for line in node.path("/var/log/provision/steps.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} >= {"identify", "fsx", "home", ""}


@pytest.mark.skipif(_PYTHON_38 is None, reason="no Python 3.8 on this machine")
def test_it_runs_on_python_3_8(node: Node) -> None:
    node.run("mkdir", "/tmp/bin")
    node.run("ln", "-s", f"{_PYTHON_38}/python3.8", "/tmp/bin/python3")
    path = {"PATH": "/tmp/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    assert node.run("python3", "--version", environment=path).stdout.startswith("Python 3.8.")
    node.provision(environment=path)
    assert_right(node)


def test_a_dry_run_of_a_new_node_changes_its_log_alone(node: Node) -> None:
    logs = ("disk/var",)
    before = snapshot(node)
    said = outcomes(node.provision("--dry-run").stdout)
    assert said["users"] == said["home"] == said["ssh_keys"] == "would change"
    after = snapshot(node)
    assert {key: after[key] for key in after if key not in logs} == {
        key: before[key] for key in before if key not in logs
    }


def test_a_node_knows_itself_without_instance_metadata(node: Node) -> None:
    node.provision(environment={"PROVISION_IMDS": "http://127.0.0.1:9"})
    assert node_number(node) == CONTROLLER.instance_id
    assert_right(node)


def test_many_nodes_at_once(tmp_path: Path) -> None:
    with nodes(tmp_path, workers=4) as machines:
        with ThreadPoolExecutor(len(machines)) as pool:
            list(pool.map(Node.provision, machines))
        for node in machines:
            assert_right(node)
        # However many nodes there are, each reads one file to know them all.
        shared = sorted(path.name for path in machines[0].path("/srv/lustre/.provision").iterdir())
        assert shared == ["ssh_host_ca", "staging"]
        known = {node.path("/etc/ssh/ssh_known_hosts_hyperpod_ft").read_text() for node in machines}
        assert len(known) == 1
        assert machines[0].path("/srv/lustre/ubuntu/.bashrc").read_text() == 'alias ll="ls -l"\n'
        before = [snapshot(node) for node in machines]
        with ThreadPoolExecutor(len(machines)) as pool:
            list(pool.map(Node.provision, machines))
        assert [snapshot(node) for node in machines] == before


def test_what_a_killed_run_was_preparing_is_removed(node: Node) -> None:
    node.provision()
    left = node.path(f"/srv/lustre/.provision/staging/{node_number(node)}.home.bob")
    left.mkdir()
    assert outcomes(node.provision().stdout)["fsx"] == "changed"
    assert_right(node)


def test_two_runs_on_one_node_follow_each_other(node: Node) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: outcomes(node.provision().stdout), range(2))
    assert sorted([first["home"], second["home"]]) == ["already so", "changed"]
    assert_right(node)


def _mount_after(node: Node, command: str) -> None:
    program = node.path("/usr/sbin/mount.lustre")
    program.write_text(program.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\n{command}\n"))


def test_ending_a_run_ends_its_commands(legacy_node: Node) -> None:
    _mount_after(legacy_node, "sleep 300")
    script = f"cd {SCRIPTS} && timeout 1 python3 -B -m provision --only fsx"
    assert legacy_node.run("bash", "-c", script, check=False).returncode == 124
    running = "pgrep", "-x", "sleep|python3"
    wait_for(lambda: legacy_node.run(*running, check=False).stdout.count("\n") == 1)  # instance metadata


def test_what_a_killed_run_left_at_work_is_waited_for(legacy_node: Node, tmp_path: Path) -> None:
    _mount_after(legacy_node, "until [ -e /tmp/killed ]; do sleep 0.1; done; sleep 2")
    script = f"cd {SCRIPTS} && exec python3 -B -m provision --only fsx"
    with legacy_node.start("bash", "-c", script, log=tmp_path / "killed.log"):
        wait_for(lambda: legacy_node.run("pgrep", "-x", "sleep", check=False).returncode == 0, every=0.05)
        legacy_node.run("pkill", "-KILL", "--oldest", "-f", "python3 -B -m provision")
    legacy_node.path("/tmp/killed").touch()
    legacy_node.provision()
    # Mounted by what the killed run left, and not once more on top.
    assert legacy_node.run("grep", "-c", " /fsx ", "/proc/self/mountinfo").stdout == "1\n"
    assert_right(legacy_node)


_SEED = 5


@pytest.mark.timeout(1800)
def test_killed_anywhere_and_run_again(tmp_path: Path) -> None:
    """Two nodes at a time, each killed at random moments beside the other; then both are right, with one key."""
    moments = random.Random(_SEED)

    def killed_and_run_again(node: Node, seconds: list[float]) -> None:
        for until in seconds:
            # A pid namespace of its own, so that everything the run started dies in the same instant.
            killed = ("timeout", "-s", "KILL", f"{until:.3f}", "unshare", "-p", "--fork", "--kill-child")
            node.run(*killed, *node.provision_command(), check=False)
        node.provision()

    for number in range(4):
        folder = tmp_path / str(number)
        folder.mkdir()
        with nodes(folder, workers=1) as both:
            until = [[moments.uniform(0.1, 0.7) for _ in range(5)] for _ in both]
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(killed_and_run_again, both, until))
            for node in both:
                assert_right(node)
