"""The ssh configuration as text, and in use by ssh, scp and a real sshd (see ssh_nodes.py)."""

import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.cluster.hyperpod.api import list_nodes
from hyperpod_ft.cluster.ssh import config as ssh_config
from hyperpod_ft.cluster.ssh import connect as ssh
from hyperpod_ft.cluster.ssh import ssm
from hyperpod_ft.errors import UserError
from tests.aws import ssh_cluster, ssh_nodes
from tests.aws.conftest import REGION, Aws
from tests.aws.ssh_cluster import AWS_CLI, Reach, instance_of, replace
from tests.aws.ssh_nodes import USER, Nodes
from tests.waiting import wait_for

nodes, sagemaker, reachable = ssh_nodes.nodes, ssh_cluster.sagemaker, ssh_cluster.reachable  # fixtures
Run = Callable[..., subprocess.CompletedProcess[str]]


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
        with pytest.raises(UserError, match="cannot express this path"):
            ssh_config.quoted(Path(name))

    def test_removed_with_the_cluster(self, tmp_path: Path) -> None:
        files = ssh_config.SshFiles("c", tmp_path)
        files.lead_to("c.w", "i-1")
        files.forget()
        files.forget()
        assert list((tmp_path / ".ssh" / "hyperpod-ft").iterdir()) == []


class TestTheConfigurationInUse:
    """As scp, rsync and VS Code use it: host names only, with the node looked up at each connection."""

    @pytest.fixture
    def run(self, nodes: Nodes, reachable: Reach) -> Run:
        route = reachable(nodes.home)
        ssh.connect(route, ssh.SshRequest(USER, command=("true",)), print)

        def run(*words: str) -> subprocess.CompletedProcess[str]:
            command = [words[0], "-F", str(route.files.config), *words[1:]]
            return subprocess.run(
                command, check=False, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
            )

        return run

    def test_a_replaced_node_raises_no_alarm(self, nodes: Nodes, sagemaker: Any, run: Run) -> None:
        assert run("ssh", "c.worker-group-1", "echo hello").stdout == "hello\n"
        old, new = replace(sagemaker, nodes, "worker-group-1")
        done = run("ssh", "c.worker-group-1", "echo hello")
        assert (done.stdout, done.returncode) == ("hello\n", 0), done.stderr
        known = nodes.home / ".ssh" / "hyperpod-ft" / "c" / "nodes"
        keys = [(known / instance).read_text().split()[2] for instance in (old, new)]
        assert keys[0] != keys[1]
        assert "added" not in run("ssh", "c.worker-group-1", "true").stderr, "its key is known now"

    def test_another_key_of_the_same_instance_is_refused(self, nodes: Nodes, sagemaker: Any, run: Run) -> None:
        nodes.new_host_key(instance_of(sagemaker, "controller-machine"))
        for host in ("c", "c.controller-machine"):
            done = run("ssh", host, "echo hello")
            assert (done.stdout, done.returncode) == ("", 255)
            assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in done.stderr

    def test_from_any_directory(self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "argparse.py").write_text("raise SystemExit('not Python's own argparse')\n")
        monkeypatch.chdir(tmp_path)
        done = run("ssh", "c", "echo hello")
        assert done.stdout == "hello\n", done.stderr

    def test_files_are_copied(self, run: Run, tmp_path: Path) -> None:
        source, copy = tmp_path / "source", tmp_path / "copy"
        source.write_text("data")
        assert run("scp", "-q", str(source), f"c:{copy}").returncode == 0
        assert copy.read_text() == "data"

    def test_included_by_the_users_own_configuration(self, nodes: Nodes, reachable: Reach) -> None:
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
        """ssh sends its ProxyCommand SIGHUP; what the command started must not stay behind."""
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
            proxy.stdout.read()  # reads to the end: no process holds it open any more
            assert proxy.wait(300) == 0
            assert proxy.stderr.read() == b""

    def test_no_node_says_why_in_a_line(self, sagemaker: Any, run: Run, aws: Aws) -> None:
        aws.scenario(seconds={"node.launch": 3600})
        sagemaker.batch_replace_cluster_nodes(ClusterName="c", NodeIds=[instance_of(sagemaker, "worker-group-1")])
        wait_for(lambda: not any(n.running and n.group == "worker-group-1" for n in list_nodes(sagemaker, "c")))
        done = run("ssh", "c.worker-group-1", "true")
        assert "hyperpod-ft: c: no node of worker-group-1 is Running (" in done.stderr
        assert "Traceback" not in done.stderr
