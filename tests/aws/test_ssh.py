"""Into a node: which one, with which key, host key and configuration; by real ssh to a real sshd (see ssh_nodes.py)."""

import dataclasses
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.aws.hyperpod import api
from hyperpod_ft.aws.hyperpod.api import Cluster, Group
from hyperpod_ft.aws.hyperpod.nodes import Node, list_nodes
from hyperpod_ft.aws.ssh import choice as reach
from hyperpod_ft.aws.ssh import config as ssh_config
from hyperpod_ft.aws.ssh import connect as ssh
from hyperpod_ft.aws.ssh import key as ssh_key
from hyperpod_ft.aws.ssh import ssm
from hyperpod_ft.errors import UserError
from tests.aws import ssh_nodes, test_server
from tests.aws.conftest import REGION, ROOT, Aws
from tests.aws.ssh_nodes import USER, Nodes, new_key
from tests.aws.test_server import group, until

nodes, account = ssh_nodes.nodes, test_server.account  # fixtures

AWS_CLI = ssm.AwsCli(REGION)
EASY_SSH = ROOT / "scripts" / "easy-ssh.sh"


def a_cluster(*names: str, roles: bool = True) -> Cluster:
    kinds = {"login-group": "Login", "controller-machine": "Controller"}
    return Cluster(
        "c",
        f"arn:aws:sagemaker:{REGION}:123456789012:cluster/abc123",
        "InService",
        "",
        tuple(Group(name, "", 1, 1, "", "", kinds.get(name, "Compute") if roles else "") for name in names),
        subnets=(),
        kubernetes=False,
    )


def a_node(group: str, instance: str, status: str = "Running", hostname: str = "", message: str = "") -> Node:
    return Node(group, instance, "ml.trn1.32xlarge", status, message, 0.0, hostname)


class TestWhichNode:
    def test_the_login_group_else_the_controller(self) -> None:
        assert reach.login_group(a_cluster("controller-machine", "worker-group-1", "login-group")) == "login-group"
        assert reach.login_group(a_cluster("worker-group-1", "controller-machine")) == "controller-machine"

    def test_without_roles_the_usual_names_or_the_cluster_files(self) -> None:
        cluster = a_cluster("worker-group-1", "controller-machine", "head", roles=False)
        assert reach.login_group(cluster) == "controller-machine"
        assert reach.login_group(cluster, ("head",)) == "head"
        with pytest.raises(UserError, match="give --group: worker-group-1, head"):
            reach.login_group(a_cluster("worker-group-1", "head", roles=False))

    def test_a_group_is_not_another_whose_name_begins_with_its_own(self) -> None:
        cluster = a_cluster("worker-group-10", "worker-group-1")
        there = [a_node("worker-group-10", "i-10"), a_node("worker-group-1", "i-1")]
        assert reach.in_group(cluster, there, "worker-group-1").instance_id == "i-1"

    def test_a_running_node_before_others(self) -> None:
        there = [a_node("w", "i-1", "Failure"), a_node("w", "i-2"), a_node("w", "i-3")]
        assert reach.in_group(a_cluster("w"), there, "w").instance_id == "i-2"

    def test_none_running_says_which_states_there_are(self) -> None:
        there = [a_node("w", "i-1", "Failure"), a_node("w", "", "Pending"), a_node("v", "i-3")]
        with pytest.raises(UserError, match=r"no node of w is Running \(1 Failure, 1 Pending\).*one of: v"):
            reach.in_group(a_cluster("w", "v"), there, "w")
        with pytest.raises(UserError, match="it has none"):
            reach.in_group(a_cluster("w", "v"), [], "w")

    def test_an_unknown_group(self) -> None:
        with pytest.raises(UserError, match=r"did you mean worker-group-1\?.*known: worker-group-1"):
            reach.in_group(a_cluster("worker-group-1"), [], "worker-group")

    def test_a_node_by_id_or_host_name(self) -> None:
        there = [a_node("w", "i-1", "ShuttingDown", message="bye"), a_node("w", "i-2", hostname="ip-10-1-2-3")]
        assert reach.by_name(a_cluster("w"), there, "i-2") == reach.by_name(a_cluster("w"), there, "ip-10-1-2-3")
        with pytest.raises(UserError, match="i-1 of w is ShuttingDown: bye"):
            reach.by_name(a_cluster("w"), there, "i-1")


ED25519 = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
COMMENT = "'; touch pwned; $(touch pwned) `touch pwned` \" | & \\ %s #"


class TestTheKey:
    @pytest.mark.parametrize("text", [ED25519, f"{ED25519} me@there\n", f"\n{ED25519} {COMMENT}\r\n\n"])
    def test_one_line_is_taken_as_it_is(self, text: str) -> None:
        assert ssh_key.checked(text, "key.pub") == text.strip()

    @pytest.mark.parametrize(
        "text",
        [
            "",
            f"{ED25519}\n{ED25519}\n",
            f"{ED25519} a\x1b]0;b\n",
            f"{ED25519} a\x00b\n",
            f"{ED25519} a\u2028b\n",
            f'command="rm -rf ~" {ED25519}\n',
            ED25519.replace("ssh-ed25519", "ssh-rsa"),
            ED25519.replace("ssh-ed25519", "ssh-dss"),
            "ssh-ed25519 AAAA;touch",
            "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAA\n-----END OPENSSH PRIVATE KEY-----\n",
        ],
    )
    def test_nothing_else_leaves_this_machine(self, text: str) -> None:
        with pytest.raises(UserError, match=r"key\.pub: ") as error:
            ssh_key.checked(text, "key.pub")
        assert "b3Blbn" not in str(error.value)

    def test_the_first_usual_one_or_the_one_given(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="ssh-keygen -t ed25519"):
            ssh_key.find(None, tmp_path)
        for name in ("id_rsa", "id_ecdsa", "work"):
            new_key(tmp_path / name, name)
        assert ssh_key.find(None, tmp_path).line.endswith(" id_ecdsa")
        for given in ("work", "work.pub"):
            found = ssh_key.find(tmp_path / given, tmp_path)
            assert (found.file, found.line.split()[-1]) == (tmp_path / "work", "work")
        (tmp_path / "work").unlink()
        assert ssh_key.find(tmp_path / "work", tmp_path).file == tmp_path / "work.pub", "its private key is an agent's"

    def test_a_private_key_alone_says_how_to_make_the_public_one(self, tmp_path: Path) -> None:
        new_key(tmp_path / "my key")
        (tmp_path / "my key.pub").unlink()
        with pytest.raises(UserError, match=r"ssh-keygen -y -f '.*my key' >'.*my key\.pub'"):
            ssh_key.find(tmp_path / "my key", tmp_path)

    def test_the_command_holds_words_and_base64_only(self) -> None:
        line = f"{ED25519} {COMMENT}"
        *shell, script = shlex.split(ssh_key.command("alice", line))
        assert shell == ["sh", "-c"]
        assert set(script) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/= |-")
        for user in ("alice; true", "$(true)", "-u", "", "alice bob"):
            with pytest.raises(UserError, match="is no Linux user name"):
                ssh_key.command(user, line)
            with pytest.raises(UserError, match="is no Linux user name"):
                ssh.SshRequest(user)


@pytest.fixture
def put(nodes: Nodes) -> Callable[..., str]:
    """Runs the command on a node's stand-in as SSM's agent does: words, no shell, standard input closed."""
    nodes.add("i-1")

    def run(line: str, user: str = USER) -> str:
        environment = {**os.environ, "PATH": f"{nodes.directory / 'i-1' / 'bin'}:{os.environ['PATH']}"}
        words = shlex.split(ssh_key.command(user, line))
        done = subprocess.run(
            words, check=False, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.removeprefix("hyperpod-ft-key: ").strip()

    return run


class TestOnTheNode:
    def test_no_file_yet(self, nodes: Nodes, put: Callable[..., str]) -> None:
        assert put(ED25519) == "added"
        assert nodes.authorized_keys.read_text() == f"{ED25519}\n"
        assert stat.S_IMODE(nodes.authorized_keys.stat().st_mode) == 0o600
        assert stat.S_IMODE(nodes.authorized_keys.parent.stat().st_mode) == 0o700

    @pytest.mark.parametrize(
        ("before", "after", "said"),
        [
            ("", f"{ED25519} new\n", "added"),
            ("ssh-rsa AAAA other", f"ssh-rsa AAAA other\n{ED25519} new\n", "added"),
            ("ssh-rsa AAAA other\n", f"ssh-rsa AAAA other\n{ED25519} new\n", "added"),
            (f"# {ED25519} new\n", f"# {ED25519} new\n{ED25519} new\n", "added"),
            (f"{ED25519} old\n", f"{ED25519} old\n", "present"),
            (f'from="10.0.0.0/8" {ED25519}', f'from="10.0.0.0/8" {ED25519}', "present"),
        ],
    )
    def test_exactly_once(
        self,
        nodes: Nodes,
        put: Callable[..., str],
        before: str,
        after: str,
        said: str,
    ) -> None:
        nodes.authorized_keys.parent.mkdir()
        nodes.authorized_keys.write_text(before)
        nodes.authorized_keys.chmod(0o644)
        assert put(f"{ED25519} new") == said
        assert put(f"{ED25519} new") == "present"
        assert nodes.authorized_keys.read_text() == after
        assert stat.S_IMODE(nodes.authorized_keys.stat().st_mode) == 0o600

    def test_many_at_once(self, nodes: Nodes, put: Callable[..., str]) -> None:
        said: list[str] = []
        threads = [threading.Thread(target=lambda: said.append(put(ED25519))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(said) == ["added"] + 7 * ["present"]
        assert nodes.authorized_keys.read_text() == f"{ED25519}\n"

    def test_a_comment_is_text(
        self,
        nodes: Nodes,
        put: Callable[..., str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(nodes.shared)
        assert put(f"{ED25519} {COMMENT}") == "added"
        assert nodes.authorized_keys.read_text() == f"{ED25519} {COMMENT}\n"
        assert [path.name for path in nodes.shared.iterdir()] == [".ssh"]

    def test_no_such_user(self, put: Callable[..., str]) -> None:
        assert put(ED25519, "nobody") == "no-user"

    def test_no_home(self, nodes: Nodes, put: Callable[..., str]) -> None:
        nodes.shared.rmdir()
        assert put(ED25519).startswith("failed: ")

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
    def test_as_root_all_is_the_users_and_no_link_of_theirs_is_followed_further(
        self,
        nodes: Nodes,
        put: Callable[..., str],
    ) -> None:
        with tempfile.TemporaryDirectory() as directory:
            home = Path(directory)
            shutil.chown(home, "nobody")
            nodes.user("i-1", "nobody", home)
            assert put(ED25519, "nobody") == "added"
            keys = home / ".ssh" / "authorized_keys"
            assert (keys.owner(), keys.parent.owner()) == ("nobody", "nobody")
            roots = nodes.shared / "roots"
            roots.touch()
            keys.unlink()
            keys.symlink_to(roots)
            assert put(ED25519, "nobody").startswith("failed: ")
            assert roots.read_text() == ""


class TestSessions:
    @pytest.mark.parametrize(
        ("said", "told"),
        [
            ("SessionManagerPlugin is not found. Please", "session-manager-plugin is not installed; install it: https"),
            (
                "(TargetNotConnected) when calling the StartSession operation: x is not",
                "w i-0123: its SSM agent is not",
            ),
            ("failed to start pty since RunAs user ubuntu does not exist", "logs in as ubuntu .*clear Run As"),
            ("please set the RunAs default user", "Run As switched on without a user"),
            ("An error occurred (ExpiredTokenException) when calling", "have expired; log in again"),
            ("Unable to locate credentials. You can", "no valid AWS credentials; run `aws configure`"),
            ("The config profile (x y) could not be found", "no AWS profile x y"),
            ("An error occurred (AccessDeniedException) when calling", "allow ssm:StartSession"),
            ("An error occurred (InvalidDocument) when calling", "use --ssm"),
            (
                "\nStarting session with SessionId: a-1\nboom AKIAABCDEFGHIJKLMNOP\n",
                r"no session: boom \.\.\.; try again",
            ),
            ("", "the AWS CLI said nothing"),
        ],
    )
    def test_what_failed_becomes_a_line_with_what_to_do(self, said: str, told: str) -> None:
        with pytest.raises(UserError, match=told):
            raise ssm.explained(said, "sagemaker-cluster:abc_w-i-0123")

    def test_missing_programs(self, nodes: Nodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(ssm, "_USUAL_PLACES", ())
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        ssm.require("aws", "session-manager-plugin")
        (tmp_path / "bin" / "session-manager-plugin").unlink()
        with pytest.raises(UserError, match=r"session-manager-plugin is not installed; install it: https://docs.aws"):
            ssm.tunnel(AWS_CLI, "sagemaker-cluster:abc_w-i-0123")
        (tmp_path / "bin" / "aws").unlink()
        with pytest.raises(UserError, match=r"the AWS CLI \(aws\) is not installed; install it: https://docs.aws"):
            ssm.run(AWS_CLI, "sagemaker-cluster:abc_w-i-0123", "true", "answer")

    def test_a_node_that_hangs(self, nodes: Nodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """The CLI's child, which is the plugin, holds the output; it must not hold us."""
        ssh_nodes.install(tmp_path / "bin" / "aws", "sleep 60 & wait")
        monkeypatch.setattr(ssm, "_SECONDS", 0.2)
        with pytest.raises(UserError, match=r"w i-0123: no answer within 0\.2 s; its /fsx may hang; look with --ssm"):
            ssm.run(AWS_CLI, "sagemaker-cluster:abc_w-i-0123", "true", "answer")


class TestTheConfiguration:
    def test_hosts_are_literal(self, tmp_path: Path) -> None:
        files = ssh_config.SshFiles("c", tmp_path / "100% mine")
        account = ssm.AwsCli(REGION, "a profile; $(rm)")
        text = files.hosts_text(account, "ubuntu", files.home / "key", "login", ["ctl", "login"])
        assert "Host c c.login\n" in text
        assert "Host c.ctl\n" in text
        assert "Host c c.login c.ctl\n" in text
        assert "--group ctl --region us-west-2 --profile 'a profile; $(rm)'\n" in text
        assert f'IdentityFile "{tmp_path}/100%% mine/key"' in text
        assert "%h" not in text

    @pytest.mark.parametrize("name", ['a"b', "a\\b", "a${HOME}", "a\nb"])
    def test_paths_that_ssh_cannot_name_are_refused(self, name: str) -> None:
        with pytest.raises(UserError, match="cannot name this path"):
            ssh_config.quoted(Path(name))

    def test_removed_with_the_cluster(self, tmp_path: Path) -> None:
        files = ssh_config.SshFiles("c", tmp_path)
        files.lead_to("c.w", "i-1")
        files.forget()
        files.forget()
        assert list((tmp_path / ".ssh" / "hyperpod-ft").iterdir()) == []


@pytest.fixture
def sagemaker(aws: Aws, account: dict[str, Any], nodes: Nodes) -> Any:
    """Cluster c with a controller and two worker groups, InService, and a node to log into for each of its nodes."""
    client = aws.client("sagemaker")
    groups = [
        group(account, "controller-machine", 1, "Controller", "ml.c5.xlarge"),
        group(account, "worker-group-10", 1, "Compute", "ml.trn2.48xlarge"),
        group(account, "worker-group-1", 1, "Compute", "ml.trn1.32xlarge"),
    ]
    client.create_cluster(
        ClusterName="c",
        InstanceGroups=groups,
        VpcConfig=account["VpcConfig"],
        Orchestrator={"Slurm": {"SlurmConfigStrategy": "Managed"}},
    )
    until(lambda: client.describe_cluster(ClusterName="c")["ClusterStatus"] == "InService")
    for node in list_nodes(client, "c"):
        nodes.add(node.instance_id)
    return client


@pytest.fixture
def reachable(sagemaker: Any) -> Callable[..., ssh.SshRoute]:
    def make(home: Path, **request: Any) -> ssh.SshRoute:
        cluster = api.require(sagemaker, "c")
        return ssh.choose_route(cluster, list_nodes(sagemaker, "c"), AWS_CLI, ssh.SshRequest(USER, **request), home)

    return make


def instance_of(sagemaker: Any, name: str) -> str:
    (found,) = [node.instance_id for node in list_nodes(sagemaker, "c") if node.group == name and node.running]
    return found


def replace(sagemaker: Any, nodes: Nodes, name: str) -> tuple[str, str]:
    """HyperPod replaces the node of a group. The instances before and after."""
    old = instance_of(sagemaker, name)
    sagemaker.batch_replace_cluster_nodes(ClusterName="c", NodeIds=[old])
    until(lambda: any(n.running and n.group == name and n.instance_id != old for n in list_nodes(sagemaker, "c")))
    until(lambda: not any(n.instance_id == old for n in list_nodes(sagemaker, "c")))
    new = instance_of(sagemaker, name)
    nodes.add(new)
    return old, new


class TestConnecting:
    """By real ssh; `connect` runs in this process, and ssh and all below it as its children."""

    @pytest.fixture
    def connect(
        self,
        nodes: Nodes,
        reachable: Callable[..., ssh.SshRoute],
        capfd: pytest.CaptureFixture[str],
    ) -> Callable[..., tuple[int, str, str]]:
        def run(*command: str, **request: Any) -> tuple[int, str, str]:
            wanted = ssh.SshRequest(USER, command=command, **request)
            capfd.readouterr()
            status = ssh.connect(reachable(nodes.home, **request), wanted, print)
            return status, *capfd.readouterr()

        return run

    def test_a_command_on_the_controller_and_its_exit_status(
        self,
        nodes: Nodes,
        sagemaker: Any,
        connect: Callable[..., tuple[int, str, str]],
    ) -> None:
        status, out, _ = connect("echo $((40 + 2)); exit 7")
        assert (status, out.splitlines()[-1]) == (7, "42")
        assert f"controller-machine {instance_of(sagemaker, 'controller-machine')}" in out
        assert nodes.authorized_keys.read_text().splitlines() == [nodes.public_key]

    def test_the_key_goes_up_once(
        self,
        nodes: Nodes,
        connect: Callable[..., tuple[int, str, str]],
    ) -> None:
        assert "now takes the key" in connect("true")[1]
        assert "now takes the key" not in connect("true", group="worker-group-1")[1]
        assert nodes.sessions() == ["AWS-StartNonInteractiveCommand", "AWS-StartSSHSession", "AWS-StartSSHSession"]
        nodes.authorized_keys.unlink()
        with pytest.raises(UserError, match="ssh failed"):
            connect("true")
        assert connect("true")[0] == 0, "after a failure the key is looked after again"
        assert nodes.authorized_keys.read_text().splitlines() == [nodes.public_key]

    def test_another_key_with_an_awkward_name(self, nodes: Nodes, connect: Callable[..., tuple[int, str, str]]) -> None:
        given = nodes.home / ".ssh" / "100% mine"
        new_key(given, COMMENT)
        assert connect("true", identity=given)[0] == 0
        assert nodes.authorized_keys.read_text() == given.with_name("100% mine.pub").read_text()

    def test_files_are_the_users_alone(
        self,
        nodes: Nodes,
        connect: Callable[..., tuple[int, str, str]],
    ) -> None:
        connect("true")
        kits = nodes.home / ".ssh" / "hyperpod-ft"
        for path in (kits, *(path for path in kits.rglob("*") if path.is_dir()), *kits.glob("c/*")):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
        assert not (nodes.home / ".ssh" / "config").exists()

    def test_exactly_the_group_or_node_asked_for(
        self,
        nodes: Nodes,
        sagemaker: Any,
        connect: Callable[..., tuple[int, str, str]],
    ) -> None:
        one, ten = instance_of(sagemaker, "worker-group-1"), instance_of(sagemaker, "worker-group-10")
        connect("true", group="worker-group-1")
        connect("true", node=ten)
        sessions = (nodes.directory / "sessions").read_text().split()
        assert [word.rpartition("_")[2] for word in sessions[-3::2]] == [
            f"worker-group-1-{one}",
            f"worker-group-10-{ten}",
        ]

    def test_a_port_is_forwarded(
        self,
        nodes: Nodes,
        connect: Callable[..., tuple[int, str, str]],
        tmp_path: Path,
    ) -> None:
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

                with until(dial, 30) as there, server.accept()[0] as here:
                    there.sendall(b"through")
                    got.append(here.recv(7))
                done.touch()

            thread = threading.Thread(target=through)
            thread.start()
            wait = f"while ! [ -e {shlex.quote(str(done))} ]; do sleep 0.05; done"
            assert connect(wait, forwards=(f"127.0.0.1:{near}:127.0.0.1:{far}",))[0] == 0
            thread.join()
            assert got == [b"through"]

    def test_no_such_user(
        self,
        nodes: Nodes,
        sagemaker: Any,
        connect: Callable[..., tuple[int, str, str]],
    ) -> None:
        nodes.user(instance_of(sagemaker, "controller-machine"), "nobody", nodes.shared)
        with pytest.raises(UserError, match=f"there is no user {USER} on this node; give --user"):
            connect("true")

    def test_sessions_that_fail(
        self,
        nodes: Nodes,
        sagemaker: Any,
        connect: Callable[..., tuple[int, str, str]],
    ) -> None:
        instance = instance_of(sagemaker, "controller-machine")
        nodes.says(instance, "Unable to start command: failed to start pty since RunAs user ubuntu does not exist")
        with pytest.raises(UserError, match=r"logs in as ubuntu \(RunAs\)"):
            connect("true")
        nodes.says(instance, "Cannot perform start session: EOF", "")
        assert connect("true")[0] == 0, "AWS's plugin now and then says so; asking again helps"

    def test_not_connected(self, nodes: Nodes, reachable: Callable[..., ssh.SshRoute]) -> None:
        route = reachable(nodes.home)
        gone = dataclasses.replace(route, node=a_node("controller-machine", "i-0"))
        with pytest.raises(UserError, match="controller-machine i-0: its SSM agent is not connected"):
            ssh.connect(gone, ssh.SshRequest(USER), print)

    def test_a_shell_without_ssh(
        self,
        nodes: Nodes,
        reachable: Callable[..., ssh.SshRoute],
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        route = reachable(nodes.home)
        assert ssh.shell(route, print) == 0
        assert f"a shell on {route.node.instance_id}" in capfd.readouterr().out
        assert nodes.sessions() == ["shell"]

    def test_a_preview_does_nothing(self, nodes: Nodes, reachable: Callable[..., ssh.SshRoute], aws: Aws) -> None:
        route = reachable(nodes.home)
        before = sorted(nodes.home.rglob("*"))
        text = ssh.preview(route, ssh.SshRequest(USER, forwards=("8888:localhost:8888",), command=("-x",)))
        assert f"target   sagemaker-cluster:{route.cluster.id}_controller-machine-{route.node.instance_id}\n" in text
        command = shlex.split(text.partition("command  ")[2])
        assert command[:3] == ["ssh", "-F", f"{nodes.home}/.ssh/hyperpod-ft/c/config"]
        assert command[-5:] == ["-L", "8888:localhost:8888", "--", "c", "-x"]
        assert sorted(nodes.home.rglob("*")) == before
        assert nodes.sessions() == []


class TestTheConfigurationInUse:
    """What scp, rsync and VS Code do with it: names alone, and the node found with each connection."""

    @pytest.fixture
    def run(
        self,
        nodes: Nodes,
        reachable: Callable[..., ssh.SshRoute],
    ) -> Callable[..., subprocess.CompletedProcess[str]]:
        route = reachable(nodes.home)
        ssh.connect(route, ssh.SshRequest(USER, command=("true",)), print)

        def run(*words: str) -> subprocess.CompletedProcess[str]:
            command = [words[0], "-F", str(route.files.config), *words[1:]]
            return subprocess.run(
                command, check=False, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
            )

        return run

    def test_a_replaced_node_is_no_alarm(
        self,
        nodes: Nodes,
        sagemaker: Any,
        run: Callable[..., subprocess.CompletedProcess[str]],
    ) -> None:
        assert run("ssh", "c.worker-group-1", "echo hello").stdout == "hello\n"
        old, new = replace(sagemaker, nodes, "worker-group-1")
        done = run("ssh", "c.worker-group-1", "echo hello")
        assert (done.stdout, done.returncode) == ("hello\n", 0), done.stderr
        known = nodes.home / ".ssh" / "hyperpod-ft" / "c" / "nodes"
        keys = [(known / instance).read_text().split()[2] for instance in (old, new)]
        assert keys[0] != keys[1]
        assert "added" not in run("ssh", "c.worker-group-1", "true").stderr, "its key is known now"

    def test_another_key_of_the_same_instance_is_refused(
        self,
        nodes: Nodes,
        sagemaker: Any,
        run: Callable[..., subprocess.CompletedProcess[str]],
    ) -> None:
        nodes.new_host_key(instance_of(sagemaker, "controller-machine"))
        for host in ("c", "c.controller-machine"):
            done = run("ssh", host, "echo hello")
            assert (done.stdout, done.returncode) == ("", 255)
            assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in done.stderr

    def test_from_any_directory(
        self, run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "argparse.py").write_text("raise SystemExit('not Python's own argparse')\n")
        monkeypatch.chdir(tmp_path)
        done = run("ssh", "c", "echo hello")
        assert done.stdout == "hello\n", done.stderr

    def test_files_are_copied(self, run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
        source, copy = tmp_path / "source", tmp_path / "copy"
        source.write_text("data")
        assert run("scp", "-q", str(source), f"c:{copy}").returncode == 0
        assert copy.read_text() == "data"

    def test_included_by_the_users_own_configuration(
        self,
        nodes: Nodes,
        reachable: Callable[..., ssh.SshRoute],
    ) -> None:
        text = ssh.write_config(reachable(nodes.home), ssh.SshRequest(USER))
        (include,) = [line.removeprefix("#").strip() for line in text.splitlines() if "Include" in line]
        assert include == "Include ~/.ssh/hyperpod-ft/*/hosts"
        own = nodes.home / ".ssh" / "config"
        # ssh's ~ is not $HOME
        own.write_text(
            f'Include "{nodes.home}/.ssh/hyperpod-ft/*/hosts"\nHost *\n    ServerAliveInterval 7\n    Compression yes\n'
        )
        files = reachable(nodes.home).files
        for config in (own, files.config):
            shown = subprocess.run(
                ["ssh", "-G", "-F", config, "c.worker-group-1"], check=False, capture_output=True, text=True
            )
            assert shown.returncode == 0, shown.stderr
            settings = dict(line.split(" ", 1) for line in shown.stdout.splitlines())
            assert settings["compression"] == "yes", "the user's own settings hold"
            assert settings["serveraliveinterval"] == "60", "but for what the kit needs"
            assert "--group worker-group-1" in settings["proxycommand"]
            assert settings["userknownhostsfile"].endswith("known/c.worker-group-1")

    def test_it_ends_with_ssh(self, nodes: Nodes, sagemaker: Any) -> None:
        """ssh hangs up on its ProxyCommand; what that started must not stay behind."""
        proxy = subprocess.Popen(
            shlex.split(ssh_config.proxy_command(AWS_CLI, "c", "--group", "controller-machine")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        with proxy:
            assert proxy.stdout is not None
            assert proxy.stderr is not None
            assert proxy.stdout.readline().startswith(b"SSH-2.0-")
            proxy.send_signal(signal.SIGHUP)
            proxy.stdout.read()  # to its end: nobody holds it any more
            assert proxy.wait(10) == 0
            assert proxy.stderr.read() == b""

    def test_no_node_says_why_in_a_line(
        self, sagemaker: Any, run: Callable[..., subprocess.CompletedProcess[str]], aws: Aws
    ) -> None:
        aws.scenario(seconds={"node.launch": 60})
        sagemaker.batch_replace_cluster_nodes(ClusterName="c", NodeIds=[instance_of(sagemaker, "worker-group-1")])
        until(lambda: not any(n.running and n.group == "worker-group-1" for n in list_nodes(sagemaker, "c")))
        done = run("ssh", "c.worker-group-1", "true")
        assert "hyperpod-ft: c: no node of worker-group-1 is Running (" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_node_among_120(aws: Aws, account: dict[str, Any], nodes: Nodes) -> None:
    client = aws.client("sagemaker")
    aws.scenario(quotas={"ml.trn1.32xlarge for cluster usage": 130})
    client.create_cluster(
        ClusterName="c",
        InstanceGroups=[
            group(account, "worker-group-10", 118, "Compute", "ml.trn1.32xlarge"),
            group(account, "worker-group-1", 1, "Compute", "ml.trn1.32xlarge"),
            group(account, "controller-machine", 1, "Controller", "ml.c5.xlarge"),
        ],
        VpcConfig=account["VpcConfig"],
        Orchestrator={"Slurm": {"SlurmConfigStrategy": "Managed"}},
    )
    until(lambda: client.describe_cluster(ClusterName="c")["ClusterStatus"] == "InService", 30)
    there = list_nodes(client, "c")
    assert len(there) == 120
    (wanted,) = [node for node in there if node.group == "worker-group-1"]
    cluster = api.require(client, "c")
    route = ssh.choose_route(cluster, there, AWS_CLI, ssh.SshRequest(group="worker-group-1"), nodes.home)
    assert route.node == wanted
    assert route.node_name == f"worker-group-1 {wanted.instance_id}"
    crowd = ssh.choose_route(cluster, there, AWS_CLI, ssh.SshRequest(group="worker-group-10"), nodes.home)
    assert crowd.node_name.endswith(" (one of 118 Running)")
    shown = easy_ssh("-g", "worker-group-1", "--dry-run", "c")
    assert shown.stdout.splitlines()[0] == f"target   {route.target}"


def easy_ssh(*words: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(EASY_SSH), *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


class TestEasySsh:
    def test_in_and_in_again_after_a_replacement(self, nodes: Nodes, sagemaker: Any) -> None:
        def echo() -> str:
            done = easy_ssh("-u", USER, "-r", REGION, "-g", "worker-group-1", "c", "--", "echo $((40 + 2))")
            assert done.returncode == 0, done.stderr
            return done.stdout

        nodes.says(instance_of(sagemaker, "worker-group-1"), "Cannot perform start session: EOF")
        assert echo() == echo() == "42\n"
        replace(sagemaker, nodes, "worker-group-1")
        assert echo() == "42\n"
        assert nodes.authorized_keys.read_text().splitlines() == [nodes.public_key]
        config = nodes.home / ".ssh" / "hyperpod-ft" / "c" / "easy-config"
        assert stat.S_IMODE(config.stat().st_mode) == 0o600

    def test_another_key_of_the_same_instance_is_refused(self, nodes: Nodes, sagemaker: Any) -> None:
        assert easy_ssh("-u", USER, "c", "--", "true").returncode == 0
        nodes.new_host_key(instance_of(sagemaker, "controller-machine"))
        assert "HAS CHANGED" in easy_ssh("-u", USER, "c", "--", "true").stderr

    def test_a_preview_does_nothing(self, nodes: Nodes, sagemaker: Any) -> None:
        before = sorted(nodes.home.rglob("*"))
        done = easy_ssh("-L", "8888:localhost:8888", "--dry-run", "-n", instance_of(sagemaker, "worker-group-10"), "c")
        assert f"_worker-group-10-{instance_of(sagemaker, 'worker-group-10')}\n" in done.stdout
        assert " -L 8888:localhost:8888 -- c" in done.stdout
        assert sorted(nodes.home.rglob("*")) == before
        assert nodes.sessions() == []

    def test_errors(self, sagemaker: Any) -> None:
        errors: list[tuple[list[str], str]] = [
            ([], "give the cluster's name"),
            (["c", "d"], "one cluster, please"),
            (["-x", "c"], "no option -x"),
            (["c", "-g"], "-g needs a value"),
            (
                ["-g", "worker-group", "c"],
                "c has no group worker-group; give -g with one of: controller-machine worker",
            ),
            (["-n", "i-0", "c"], "c has no node i-0"),
            (["-u", "a;b", "c"], "is no Linux user name"),
            (["-u", "missing", "c"], "has no user missing"),
            (["-k", "/nowhere/key", "c"], "/nowhere/key.pub: no readable public key"),
            (["-p", "nobodys", "c"], "The config profile (nobodys) could not be found"),
        ]
        for words, told in errors:
            done = easy_ssh(*words)
            assert told in done.stderr
            assert done.returncode == 2

    def test_help(self) -> None:
        assert easy_ssh("-h").stdout.startswith("ssh to a node of a HyperPod cluster")

    def test_missing_plugin(self, nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "bin" / "session-manager-plugin").unlink()
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
        assert "session-manager-plugin is not installed; install it: https://docs.aws" in easy_ssh("c").stderr

    def test_its_part_on_the_node_is_the_kits(self) -> None:
        kits = ROOT.joinpath("hyperpod_ft", "aws", "ssh", "put_key.sh").read_text()
        assert kits in EASY_SSH.read_text()

    def test_shellcheck(self) -> None:
        for script in (EASY_SSH, ROOT / "hyperpod_ft" / "aws" / "ssh" / "put_key.sh"):
            subprocess.run(["shellcheck", str(script)], check=True)
