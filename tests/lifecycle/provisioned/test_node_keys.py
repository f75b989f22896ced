"""Keys of users and hosts: each account's own, one authority, and what is in their way."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.lifecycle.cluster import Cluster
from tests.lifecycle.instances import CONTROLLER, SETTINGS
from tests.lifecycle.nodes import LIGHT, Node, container
from tests.lifecycle.provisioned.provisioned_nodes import assert_right, nodes, outcomes
from tests.programs import write_program
from tests.waiting import wait_for


def test_the_first_key_stays(tmp_path: Path) -> None:
    """The slow node's ssh-keygen ends after the fast node has published its key."""
    with nodes(tmp_path, workers=1) as (slow, fast):
        for node in (slow, fast):
            node.provision("--only", "home")
        slow.run("mv", "/usr/bin/ssh-keygen", "/usr/bin/ssh-keygen.real")
        write_program(slow.path("/usr/bin/ssh-keygen"), 'ssh-keygen.real "$@" || exit\n[[ $1 != -q ]] || sleep 1')
        key = slow.path("/srv/lustre/ubuntu/.ssh/id_ed25519")
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(slow.provision)
            wait_for(lambda: any(key.parent.glob(".*.id_ed25519.pub")), every=0.01)
            fast.provision()
            first = key.read_bytes()
            other.result()
        assert key.read_bytes() == first
        assert_right(slow)
        assert_right(fast)


def test_a_key_left_half_made_is_removed_when_all_else_is_so(node: Node) -> None:
    """This node was killed between making and publishing it, and another made the rest; it is a private key."""
    node.provision()
    left = node.path("/srv/lustre/ubuntu/.ssh") / f".{CONTROLLER.instance_id}.id_ed25519"
    assert left.parent.is_dir()
    left.write_text("a key")
    node.provision()
    assert not left.exists()
    assert_right(node)


SSHD = pytest.mark.skipif(not Path("/usr/sbin/sshd").exists(), reason="no sshd on this machine")
SSH = ("runuser", "-u", "alice", "--", "ssh", "-o", "BatchMode=yes", CONTROLLER.address)


def start_sshd(node: Node, *options: str) -> None:
    node.run("mkdir", "-p", "/run/sshd")
    node.run("bash", "-c", "pkill -x sshd; while pgrep -x sshd; do sleep 0.05; done")
    node.run("/usr/sbin/sshd", *options)  # which returns before it listens
    node.run("bash", "-c", "until true 2>/dev/null </dev/tcp/127.0.0.1/22; do sleep 0.05; done")


@SSHD
def test_a_user_goes_to_a_node_without_a_question(node: Node) -> None:
    node.provision()
    start_sshd(node)
    assert node.run(*SSH, "id -u; pwd").stdout == "2001\n/fsx/alice\n"
    assert_right(node)
    # An impostor is not believed, also with a certificate of its own.
    make = "rm -f ssh_host_* && ssh-keygen -q -t ed25519 -N '' -f ssh_host_ed25519_key"
    sign = "ssh-keygen -q -t ed25519 -N '' -f /tmp/ca && ssh-keygen -q -s /tmp/ca -I x -h -n"
    sign += f" {CONTROLLER.address} ssh_host_ed25519_key.pub"
    for change in (make, f"{make} && {sign}"):
        node.run("bash", "-c", f"cd /etc/ssh && {change}")
        start_sshd(node)
        refused = node.run(*SSH, "true", check=False)
        assert refused.returncode == 255
        assert "Host key verification failed" in refused.stderr
    # Another host key, as after a replacement, gets its own certificate.
    node.run("pkill", "-x", "sshd")
    assert outcomes(node.provision().stdout)["ssh_hosts"] == "changed"
    start_sshd(node)
    node.run(*SSH, "true")


@SSHD
def test_an_sshd_without_the_nodes_certificate_is_reported(node: Node) -> None:
    node.run("bash", "-c", "echo PidFile none >/tmp/plain")
    start_sshd(node, "-f", "/tmp/plain")
    for _ in range(2):
        done = node.provision("--only", "ssh_hosts")
        assert "/etc/ssh/sshd_config must include sshd_config.d/*.conf" in done.stdout
        assert outcomes(done.stdout)["ssh_hosts"] == "changed"


def test_the_authority_of_host_keys_is_roots_alone_and_vouches_for_nodes_alone(node: Node) -> None:
    node.provision()
    find = ("ssh-keygen", "-f", "/etc/ssh/ssh_known_hosts_hyperpod_ft", "-F")
    for name, known in (("10.1.7.7", True), ("ip-10-1-7-7", True), ("10.2.7.7", False), ("github.com", False)):
        assert (node.run(*find, name, check=False).returncode == 0) == known
    authority = "/fsx/.provision/ssh_host_ca"
    assert node.run("stat", "-c", "%a %U", authority).stdout == "600 root\n"
    for change in ("chmod 644", "chown alice"):
        node.run("bash", "-c", f"{change} {authority}")
        done = node.provision("--only", "ssh_hosts", check=False)
        assert done.returncode == 1
        assert f"{authority} is not root's alone; move it away" in done.stdout
        node.run("bash", "-c", f"chown root {authority} && chmod 600 {authority}")
    assert_right(node)


KEYS = ["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIL0wbEe1 alice@laptop", "ssh-rsa AAAAB3NzaC1yc2EAAAADAQ== alice@work"]


def test_the_cluster_files_keys_of_a_user_open_that_account_alone(tmp_path: Path) -> None:
    users = [{**user, "public_keys": KEYS if user["name"] == "alice" else []} for user in SETTINGS["users"]]
    with container(tmp_path, LIGHT) as opened:
        (node,) = Cluster(opened, [CONTROLLER], tmp_path, users=users).nodes
        node.provision()
        folders = {name: node.path(f"/srv/lustre/{name}/.ssh") for name in ("alice", "bob", "ubuntu")}
        for name, folder in folders.items():
            own = (folder / "id_ed25519.pub").read_text().splitlines()
            assert (folder / "authorized_keys").read_text().splitlines() == [*own, *(KEYS if name == "alice" else [])]
        (folders["alice"] / "authorized_keys").write_text("")
        assert outcomes(node.provision().stdout)["ssh_keys"] == "changed"
        assert (folders["alice"] / "authorized_keys").read_text().count("laptop") == 1
        assert outcomes(node.provision().stdout)["ssh_keys"] == "already so"


def test_a_user_cannot_lead_root_astray(node: Node) -> None:
    node.provision()
    for trap in (
        "ln -s /etc .ssh",
        "mkdir .ssh && ln -s /etc/shadow .ssh/authorized_keys",
        "mkdir .ssh && mkfifo .ssh/authorized_keys",
        "touch .ssh",
        "mkdir -m 0 .ssh",
        "chmod 500 .",
        "mkdir .ssh && truncate -s 1P .ssh/authorized_keys",
    ):
        clean = "cd /fsx/alice; chmod 750 . .ssh; rm -rf .ssh"
        node.run("runuser", "-u", "alice", "--", "bash", "-c", f"{clean}; {trap}")
        before = node.path("/etc/shadow").read_text()
        done = node.provision()
        assert "skipped: alice: " in done.stdout, trap
        assert node.path("/etc/shadow").read_text() == before
        assert not node.path("/etc/id_ed25519").exists()


def test_authorized_keys_may_be_of_any_bytes(node: Node) -> None:
    node.provision()
    for name in ("alice", "ubuntu"):
        write = rf"printf 'ssh-ed25519 AAAA jos\xe9@laptop\n' >/fsx/{name}/.ssh/authorized_keys"
        node.run("runuser", "-u", name, "--", "bash", "-c", write)
    said = node.provision().stdout
    assert "skipped" not in said
    for name in ("alice", "ubuntu"):
        lines = node.path(f"/srv/lustre/{name}/.ssh/authorized_keys").read_bytes().splitlines()
        assert lines[0] == b"ssh-ed25519 AAAA jos\xe9@laptop"
        assert len(lines) == 2


def test_a_damaged_key_of_the_default_user_is_an_error(node: Node) -> None:
    node.provision()
    node.run("bash", "-c", "echo x >/fsx/ubuntu/.ssh/id_ed25519")
    done = node.provision(check=False)
    assert done.returncode == 1
    assert "/fsx/ubuntu/.ssh/id_ed25519 is not a private key without a passphrase; move it away" in done.stdout
