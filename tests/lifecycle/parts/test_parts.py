"""The parts of lifecycle/provision that need no node: settings, steps, files and processes."""

from __future__ import annotations

import ast
import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from provision import apt, shared
from provision.accounts import PasswdEntry, _clear_stale_locks
from provision.errors import NodeError, PassingError
from provision.files import File, difference, write
from provision.mounts import Mount, mount_at
from provision.node import Node
from provision.settings import read_settings
from provision.steps import STEPS, fsx, home, ssh_keys
from provision.steps.logrotate import Logrotate

from tests.lifecycle.instances import CONTROLLER, SETTINGS
from tests.lifecycle.nodes import LIFECYCLE
from tests.programs import write_program
from tests.waiting import wait_for


def test_it_is_python_3_8() -> None:
    files = sorted((LIFECYCLE / "provision").rglob("*.py"))
    assert len(files) > 20
    standard = {*sys.stdlib_module_names, "provision"}
    for file in files:
        tree = ast.parse(file.read_text(), feature_version=(3, 8))
        for statement in ast.walk(tree):
            if isinstance(statement, ast.Import):
                assert {name.name.split(".")[0] for name in statement.names} <= standard, file
            if isinstance(statement, ast.ImportFrom):
                assert (statement.module or "").split(".")[0] in standard, file


def test_steps_come_after_what_they_need() -> None:
    seen: set[str] = set()
    for step in STEPS:
        assert set(step.needs) <= seen, step.name
        seen.add(step.name)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("version", 2, "version 2"),
        ("default_user", "-rf", "default_user: '-rf'"),
        ("users", [{"name": "a b", "uid": 1, "gid": 1}], "users.name: 'a b'"),
        ("users", [{"name": "a", "uid": 0, "gid": 1}], "users.uid: 0"),
        (
            "users",
            [{"name": "a", "uid": 1, "gid": 1, "public_keys": ["ssh-rsa AA\nssh-rsa BB"]}],
            "users.public_keys: 'ssh-rsa AA",
        ),
        ("groups", {"g": "worker"}, "groups.g: 'worker' is not one of controller, login, compute"),
        ("fsx", {"dns_name": "x", "mount_name": "y", "mount_path": "/fsx/.."}, "fsx.mount_path"),
        ("accounting", "no", "accounting: 'no'"),
        ("provisioning", None, "provisioning: None"),
    ],
)
def test_settings_that_are_not_of_their_form(tmp_path: Path, key: str, value: Any, says: str) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({**SETTINGS, key: value}))
    with pytest.raises(NodeError) as caught:
        read_settings(file)
    assert says in str(caught.value)
    assert str(file) in str(caught.value)


def test_settings_that_lack_a_key(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({key: value for key, value in SETTINGS.items() if key != "fsx"}))
    with pytest.raises(NodeError, match="'fsx' is missing"):
        read_settings(file)


def test_the_uppermost_mount_counts() -> None:
    lines = [
        "22 1 0:20 / /fsx rw - autofs systemd-1 rw",
        r"23 1 0:21 / /fsx rw shared:1 master:2 - lustre 10.0.0.7@tcp:/a\040b rw,flock",
        "24 1 0:22 / /fsx/x rw - tmpfs tmpfs rw",
    ]
    mount = mount_at("/fsx", lines)
    assert mount is not None
    assert (mount.identity, mount.kind, mount.source) == ("23", "lustre", "10.0.0.7@tcp:/a b")
    assert mount.options == "rw,flock"
    assert mount_at("/fs", lines) is None


def test_a_key_is_authorized_once() -> None:
    line = "ssh-ed25519 AAAA alice@c\n"
    assert ssh_keys._with_once("", line) == line
    assert ssh_keys._with_once("ssh-rsa BBBB x", line) == f"ssh-rsa BBBB x\n{line}"
    restricted = 'from="10.0.0.0/8" ssh-ed25519 AAAA old\n'
    assert ssh_keys._with_once(f"{restricted}# ssh-ed25519 AAAA\n{line}", line) == f"{restricted}# ssh-ed25519 AAAA\n"


def test_a_home_that_another_node_publishes_meanwhile_wins(listed: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    template = listed.path("/etc/skel")
    template.mkdir()
    (template / ".bashrc").write_text("mine\n")
    target = listed.fsx / "alice"
    copy = home._copy

    def while_another_is_faster(source: Path, to: Path, user: PasswdEntry) -> None:
        copy(source, to, user)
        if not target.exists():
            target.mkdir()
            (target / ".bashrc").write_text("theirs\n")

    monkeypatch.setattr(home, "_copy", while_another_is_faster)
    home._make(listed, target, PasswdEntry("alice", os.getuid(), os.getgid(), str(target)), template)
    assert (target / ".bashrc").read_text() == "theirs\n"
    assert not any((listed.fsx / ".provision/staging").iterdir())


def test_what_others_could_change_is_not_prepared_in(listed: Node, tmp_path: Path) -> None:
    """Root removes what it finds there: a user who may write to the file system could lead it anywhere."""
    outside = tmp_path / "outside"
    outside.mkdir()
    provision = listed.fsx / ".provision"
    for make in (
        lambda: provision.symlink_to(outside),
        lambda: (provision.mkdir(), (provision / "staging").symlink_to(outside)),
        lambda: (provision.mkdir(), provision.chmod(0o777)),
        lambda: (provision.mkdir(), (provision / "staging").mkdir(), (provision / "staging").chmod(0o770)),
    ):
        shared.remove(provision)
        make()
        (outside / f"{CONTROLLER.instance_id}.x").touch()
        for action in (lambda: shared.staging(listed, "x"), lambda: shared.leftovers(listed)):
            with pytest.raises(NodeError, match="is not owned by root alone; move it away"):
                action()
        assert (outside / f"{CONTROLLER.instance_id}.x").exists()


def test_slurms_logs_are_rotated_by_one_owner(node: Node) -> None:
    """logrotate refuses a file whose log another one names."""
    folder = node.path("/etc/logrotate.d")
    folder.mkdir()
    (folder / "hyperpod-ft").write_text("/var/log/slurm/*.log {\n}\n")  # ours, of an earlier run
    (folder / "apt").write_text("/var/log/apt/term.log {\n}\n")
    assert "/var/log/slurm/" in Logrotate().files(node)[0].text
    (folder / "sagemaker-hyperpod-slurm").write_text('"/var/log/slurm/*.log" {\n}\n')
    (ours,) = Logrotate().files(node)
    assert "/var/log/slurm/" not in ours.text
    assert "/var/log/provision/*.log" in ours.text


@pytest.mark.parametrize(
    ("options", "number", "reported"),
    [("rw,flock", 0, False), ("rw", errno.ENOSYS, True), ("rw,localflock", 0, True)],
)
def test_a_file_system_without_locks_is_reported(
    listed: Node,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: str,
    number: int,
    reported: bool,
) -> None:
    def flock(stream: object, operation: int) -> None:
        if number:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    fsx._test_write(listed, Mount("23", "/fsx", "lustre", "10.0.0.7@tcp:/m", options))
    assert ("/fsx is mounted without flock" in capsys.readouterr().out) == reported


def test_a_file_is_written_once_and_repaired(node: Node) -> None:
    file = File("/etc/some/file.conf", "text\n", 0o640)
    assert difference(node, file) == ["no /etc/some/file.conf"]
    # What a killed run left.
    partial = node.path("/etc/some/.file.conf.provision")
    partial.parent.mkdir()
    partial.symlink_to("/nowhere")
    write(node, file)
    path = node.path(file.path)
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("text\n", 0o640)
    before = path.stat()
    write(node, file)
    assert path.stat().st_ino == before.st_ino
    path.chmod(0o666)
    assert difference(node, file) == ["/etc/some/file.conf has mode 666, not 640"]
    write(node, file)
    assert difference(node, file) == []
    assert [each.name for each in path.parent.iterdir()] == ["file.conf"]


def test_apt_waits_for_whoever_holds_its_lock(node: Node) -> None:
    lock = node.path(apt.LOCKS[0])
    lock.parent.mkdir(parents=True)
    lock.touch()
    apt.wait_for_others(node, seconds=0)
    # Another process: a process's own locks do not stop it.
    code = (
        "import fcntl, sys; fcntl.lockf(f := open(sys.argv[1], 'w'), fcntl.LOCK_EX); print('held', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(PassingError, match=f"process {other.pid} has held it"):
            apt.wait_for_others(node, seconds=0)
        other.communicate("\n")
    apt.wait_for_others(node, seconds=0)


def test_locks_of_account_programs_that_are_gone_are_removed(node: Node) -> None:
    """shadow-utils would wait for process 1 for ever."""
    node.path("/etc/passwd.lock").write_text("1\0")
    node.path("/etc/passwd.1234567").write_text("1234567\0")
    node.path("/etc/passwd-").write_text("backup")
    _clear_stale_locks(node)
    assert sorted(path.name for path in node.path("/etc").iterdir()) == ["passwd-"]


def test_the_lock_of_another_account_program_stays(node: Node, tmp_path: Path) -> None:
    """A sleep by the name of gpasswd, which has no further meaning here than that it is at work."""
    program = tmp_path / "gpasswd"
    program.write_bytes(Path("/bin/sleep").read_bytes())
    program.chmod(0o755)
    with subprocess.Popen([program, "60"]) as process:
        wait_for(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "gpasswd\n")
        node.path("/etc/group.lock").write_text(f"{process.pid}\0")
        _clear_stale_locks(node)
        assert node.path("/etc/group.lock").exists()
        process.kill()


def test_users_are_registered_once_slurm_has_accounting(tmp_path: Path) -> None:
    def registering(storage: str) -> int:
        for name, script in (
            ("scontrol", f"echo 'AccountingStorageType = accounting_storage/{storage}'; echo 'ClusterName = c'"),
            ("sacctmgr", f'[[ $* == *show* ]] && echo bob || echo "$@" >>{tmp_path}/added'),
        ):
            write_program(tmp_path / name, script)
        command = ["bash", str(LIFECYCLE / "slurm/register_users.sh"), "alice", "bob"]
        return subprocess.run(command, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=False).returncode

    assert registering("none") != 0, "else its service would not try again"
    assert registering("slurmdbd") == 0
    assert (tmp_path / "added").read_text() == "--immediate add user name=alice account=root cluster=c\n"
