"""Nodes made of namespaces, with real accounts, mounts and keys, and what is right of them. Stand-ins: see image.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.lifecycle.cluster import Cluster
from tests.lifecycle.instances import CONTROLLER, Instance
from tests.lifecycle.nodes import LIGHT, Node, container


@contextmanager
def nodes(
    directory: Path, workers: int, instance_type: str = "ml.c5.xlarge", provisioning: str = "api"
) -> Iterator[list[Node]]:
    """A controller and workers, each with the scripts. `directory` is empty."""
    addresses = [f"10.1.0.{number}" for number in range(12, 12 + workers)]
    groups = [Instance("worker-group-1", each, f"i-0123456789abcde{each[-2:]}", instance_type) for each in addresses]
    with container(directory, LIGHT) as opened:
        yield Cluster(opened, [CONTROLLER, *groups], directory, provisioning=provisioning).nodes


def outcomes(text: str) -> dict[str, str]:
    """What a run says of each step at the end."""
    found = {}
    for line in text.splitlines():
        words = line.split(" ", 2)
        if len(words) == 3 and words[1].endswith(":"):
            found[words[1][:-1]] = words[2].split(" (")[0].split(":")[0]
    return found


def assert_right(node: Node) -> None:
    """Nothing is left to do, nor anything half done."""
    said = outcomes(node.provision("--dry-run").stdout)
    assert set(said.values()) <= {"already so", "not needed", "finished"}, said
    left = [path for path in node.path("/srv/lustre/.provision/staging").iterdir() if node_number(node) in path.name]
    assert left == []
    for name in ("ubuntu", "alice", "bob"):
        folder = node.path(f"/srv/lustre/{name}/.ssh")
        assert sorted(path.name for path in folder.iterdir()) == ["authorized_keys", "id_ed25519", "id_ed25519.pub"]
        assert (folder / "authorized_keys").read_text() == (folder / "id_ed25519.pub").read_text()
        assert node.run("stat", "-c", "%U:%G", f"/fsx/{name}").stdout == f"{name}:{name}\n"
        assert node.run("getent", "shadow", name).stdout.startswith(f"{name}:")
        # The kind of file that many writers at once, or a killed one, would spoil.
        derived = node.run("ssh-keygen", "-y", "-P", "", "-f", f"/fsx/{name}/.ssh/id_ed25519").stdout
        assert derived.split()[:2] == (folder / "id_ed25519.pub").read_text().split()[:2]


def node_number(node: Node) -> str:
    identity: str = json.loads(node.path("/var/lib/provision/node.json").read_text())["instance_id"]
    return identity
