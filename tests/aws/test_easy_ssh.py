"""scripts/easy-ssh.sh against the same nodes as `cluster ssh`."""

import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.aws import ssh_cluster, ssh_nodes, test_server
from tests.aws.conftest import REGION, ROOT
from tests.aws.ssh_cluster import instance_of, replace
from tests.aws.ssh_nodes import USER, Nodes

nodes, account, sagemaker, reachable = (
    ssh_nodes.nodes,
    test_server.account,
    ssh_cluster.sagemaker,
    ssh_cluster.reachable,
)  # fixtures


EASY_SSH = ROOT / "scripts" / "easy-ssh.sh"


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
            ([], "easy-ssh.sh CLUSTER"),
            (["c", "d"], "c, d"),
            (["-x", "c"], "option -x"),
            (["c", "-g"], "-g needs a value"),
            (
                ["-g", "worker-group", "c"],
                "c has no group worker-group; pass -g with one of: controller-machine worker",
            ),
            (["-n", "i-0", "c"], "c has no node i-0"),
            (["-u", "a;b", "c"], "-u a;b: not a Linux user name"),
            (["-u", "missing", "c"], "has no user missing"),
            (["-k", "/nowhere/key", "c"], "ssh-keygen -y -f /nowhere/key"),
            (["-p", "nobodys", "c"], "The config profile (nobodys) could not be found"),
        ]
        for words, message in errors:
            done = easy_ssh(*words)
            assert message in done.stderr
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
        for script in (EASY_SSH, *ROOT.glob("hyperpod_ft/aws/ssh/*.sh")):
            subprocess.run(["shellcheck", str(script)], check=True)
