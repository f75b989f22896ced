"""`cluster ssh` logs in to a node, with real ssh and a real sshd (see ssh_nodes.py)."""

import dataclasses
import os
import shlex
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.cluster.hyperpod import api
from hyperpod_ft.cluster.hyperpod.api import GroupRoles, list_nodes
from hyperpod_ft.cluster.ssh import connect as ssh
from hyperpod_ft.digests import file_sha256
from hyperpod_ft.errors import UserError
from tests.aws import ssh_cluster, ssh_nodes
from tests.aws.account_place import Place, cluster_request
from tests.aws.conftest import Aws
from tests.aws.ssh_cluster import AWS_CLI, Reach, a_node, instance_of
from tests.aws.ssh_nodes import USER, Nodes, new_key
from tests.aws.test_ssh_key import COMMENT
from tests.waiting import wait_for

nodes, sagemaker, reachable = ssh_nodes.nodes, ssh_cluster.sagemaker, ssh_cluster.reachable  # fixtures
Connect = Callable[..., tuple[int, str, str]]  # exit status, stdout, stderr


class TestConnecting:
    """With real ssh; `connect` runs in this process, with ssh and all that it starts as children."""

    @pytest.fixture
    def connect(self, nodes: Nodes, reachable: Reach, capfd: pytest.CaptureFixture[str]) -> Connect:
        def run(*command: str, **request: Any) -> tuple[int, str, str]:
            wanted = ssh.SshRequest(USER, command=command, **request)
            capfd.readouterr()
            status = ssh.connect(reachable(nodes.home, **request), wanted, print)
            return status, *capfd.readouterr()

        return run

    def test_a_command_on_the_controller_and_its_exit_status(
        self, nodes: Nodes, sagemaker: Any, connect: Connect
    ) -> None:
        status, out, _ = connect("echo $((40 + 2)); exit 7")
        assert (status, out.splitlines()[-1]) == (7, "42")
        assert f"controller-machine {instance_of(sagemaker, 'controller-machine')}" in out
        assert nodes.authorized_keys.read_text().splitlines() == [nodes.public_key]

    def test_the_key_goes_up_once(self, nodes: Nodes, connect: Connect) -> None:
        assert "now accepts the key" in connect("true")[1]
        assert "now accepts the key" not in connect("true", group="worker-group-1")[1]
        assert nodes.sessions() == ["AWS-StartNonInteractiveCommand", "AWS-StartSSHSession", "AWS-StartSSHSession"]
        nodes.authorized_keys.unlink()
        with pytest.raises(UserError, match="ssh failed"):
            connect("true")
        assert connect("true")[0] == 0, "after a failure the key is uploaded again"
        assert nodes.authorized_keys.read_text().splitlines() == [nodes.public_key]

    def test_what_is_piped_in_reaches_the_command(self, tmp_path: Path, connect: Connect) -> None:
        """docs/cluster.md copies the kit's source this way, before any key was uploaded."""
        sent, own_input = tmp_path / "sent", os.dup(0)
        sent.write_bytes(os.urandom(200_000))
        with sent.open("rb") as stream:
            os.dup2(stream.fileno(), 0)
        try:
            status, out, _ = connect("sha256sum")
        finally:
            os.dup2(own_input, 0)
            os.close(own_input)
        assert (status, out.split()[-2:]) == (0, [file_sha256(sent), "-"])

    def test_another_key_with_an_awkward_name(self, nodes: Nodes, connect: Connect) -> None:
        given = nodes.home / ".ssh" / "100% mine"
        new_key(given, COMMENT)
        assert connect("true", identity=given)[0] == 0
        assert nodes.authorized_keys.read_text() == given.with_name("100% mine.pub").read_text()

    def test_files_are_the_users_alone(self, nodes: Nodes, connect: Connect) -> None:
        connect("true")
        kits = nodes.home / ".ssh" / "hyperpod-ft"
        for path in (kits, *(path for path in kits.rglob("*") if path.is_dir()), *kits.glob("c/*")):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
        assert not (nodes.home / ".ssh" / "config").exists()

    def test_a_port_is_forwarded(self, nodes: Nodes, connect: Connect, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as free:
            far, near = server.getsockname()[1], free.getsockname()[1]
            with pytest.raises(UserError, match="ssh failed"):
                connect("true", forwards=(f"127.0.0.1:{near}:127.0.0.1:{far}",))
            free.close()
            done = tmp_path / "done"
            got: list[bytes] = []

            def through() -> None:
                def dial() -> socket.socket | None:
                    try:
                        return socket.create_connection(("127.0.0.1", near), timeout=5)
                    except ConnectionRefusedError:
                        return None

                with wait_for(dial, 300) as there, server.accept()[0] as here:
                    there.sendall(b"through")
                    got.append(here.recv(7))
                done.touch()

            thread = threading.Thread(target=through)
            thread.start()
            wait = f"while ! [ -e {shlex.quote(str(done))} ]; do sleep 0.05; done"
            assert connect(wait, forwards=(f"127.0.0.1:{near}:127.0.0.1:{far}",))[0] == 0
            thread.join()
            assert got == [b"through"]

    def test_no_such_user(self, nodes: Nodes, sagemaker: Any, connect: Connect) -> None:
        nodes.user(instance_of(sagemaker, "controller-machine"), "nobody", nodes.shared)
        with pytest.raises(UserError, match=f"no user {USER} on this node; pass --user"):
            connect("true")

    def test_sessions_that_fail(self, nodes: Nodes, sagemaker: Any, connect: Connect) -> None:
        instance = instance_of(sagemaker, "controller-machine")
        nodes.says(instance, "Unable to start command: failed to start pty since RunAs user ubuntu does not exist")
        with pytest.raises(UserError, match=r"logs in as ubuntu \(Run As\)"):
            connect("true")
        nodes.says(instance, "Cannot perform start session: EOF", "")
        assert connect("true")[0] == 0, "AWS's plugin now and then says so; asking again helps"

    def test_not_connected(self, nodes: Nodes, reachable: Reach) -> None:
        route = reachable(nodes.home)
        gone = dataclasses.replace(route, node=a_node("controller-machine", "i-0"))
        with pytest.raises(UserError, match="controller-machine i-0: its SSM agent is not connected"):
            ssh.connect(gone, ssh.SshRequest(USER), print)

    def test_a_shell_without_ssh(self, nodes: Nodes, reachable: Reach, capfd: pytest.CaptureFixture[str]) -> None:
        route = reachable(nodes.home)
        assert ssh.shell(route, print) == 0
        assert f"a shell on {route.node.instance_id}" in capfd.readouterr().out
        assert nodes.sessions() == ["shell"]

    def test_a_preview_does_nothing(self, nodes: Nodes, reachable: Reach, aws: Aws) -> None:
        route = reachable(nodes.home)
        before = sorted(nodes.home.rglob("*"))
        text = ssh.preview(route, ssh.SshRequest(USER, forwards=("8888:localhost:8888",), command=("-x",)))
        assert f"target   sagemaker-cluster:{route.cluster.id}_controller-machine-{route.node.instance_id}\n" in text
        command = shlex.split(text.partition("command  ")[2])
        assert command[:3] == ["ssh", "-F", f"{nodes.home}/.ssh/hyperpod-ft/c/config"]
        assert command[-5:] == ["-L", "8888:localhost:8888", "--", "c", "-x"]
        assert sorted(nodes.home.rglob("*")) == before
        assert nodes.sessions() == []


def test_a_node_among_120(aws: Aws, place: Place, nodes: Nodes) -> None:
    client = aws.client("sagemaker")
    aws.scenario(quotas={"ml.trn1.32xlarge for cluster usage": 130})
    workers = ("worker-group-10", 118, "ml.trn1.32xlarge"), ("worker-group-1", 1, "ml.trn1.32xlarge")
    client.create_cluster(**cluster_request(place, "c", "lifecycle", *workers))
    wait_for(lambda: client.describe_cluster(ClusterName="c")["ClusterStatus"] == "InService", 300)
    there = list_nodes(client, "c")
    assert len(there) == 120
    (wanted,) = [node for node in there if node.group == "worker-group-1"]
    cluster = api.require(client, "c")
    roles = GroupRoles.of(cluster, None)
    route = ssh.choose_route(cluster, there, roles, AWS_CLI, ssh.SshRequest(group="worker-group-1"), nodes.home)
    assert route.node == wanted
    assert route.node_name == f"worker-group-1 {wanted.instance_id} {wanted.hostname}"
    crowd = ssh.choose_route(cluster, there, roles, AWS_CLI, ssh.SshRequest(group="worker-group-10"), nodes.home)
    assert crowd.node_name.endswith(" (one of 118 Running)")
