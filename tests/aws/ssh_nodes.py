"""Nodes to log in to: each has its own host keys and sshd; all share one home directory, as on /fsx.

The sshd and the ssh client are OpenSSH's. What lies between them on AWS, the AWS CLI, the plugin and SSM, is
tests/aws/aws_cli.py's stand-in, which starts a node's sshd on its stdin and stdout: nothing listens on a port.
"""

import getpass
import os
import pwd
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.programs import write_program

ROOT = Path(__file__).parents[2]
USER = getpass.getuser()  # sshd cannot log in other users without root; the kit gets --user
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
_CONFIG = """\
HostKey {key}
AuthorizedKeysFile "{keys}"
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PidFile none
Subsystem sftp internal-sftp
"""


@dataclass(frozen=True)
class Nodes:
    """`home`: the user's own, with ssh's files; `shared`: the user's home on the cluster."""

    directory: Path
    home: Path
    shared: Path

    @property
    def authorized_keys(self) -> Path:
        return self.shared / ".ssh" / "authorized_keys"

    @property
    def public_key(self) -> str:
        return (self.home / ".ssh" / "id_ed25519.pub").read_text().strip()

    def add(self, instance: str) -> None:
        node = self.directory / instance
        (node / "bin").mkdir(parents=True)
        self.new_host_key(instance)
        config = node / "sshd_config"
        config.write_text(_CONFIG.format(key=node / "host_key", keys=self.authorized_keys))
        start = f"exec {SSHD} -i -f {shlex.quote(str(config))} -E {shlex.quote(str(node / 'log'))}"
        if os.geteuid() == 0 and not Path("/run/sshd").is_dir():
            # sshd needs this directory; its service, which does not run here, would create it
            start = f"exec unshare --mount sh -c {shlex.quote(f'mount -t tmpfs none /run; mkdir /run/sshd; {start}')}"
        (node / "sshd").write_text(start + "\n")
        self.user(instance, USER, self.shared)

    def user(self, instance: str, name: str, home: Path) -> None:
        """Make this the node's only user, with that home directory."""
        record = pwd.getpwnam(name)
        line = f"{name}:x:{record.pw_uid}:{record.pw_gid}::{home}:/bin/sh"
        answer = f'[ "$2" = {name} ] && echo {shlex.quote(line)}'
        write_program(self.directory / instance / "bin" / "getent", answer)

    def new_host_key(self, instance: str) -> None:
        new_key(self.directory / instance / "host_key")

    def says(self, instance: str, *lines: str) -> None:
        """Make the next sessions of the node fail with these messages."""
        fails = self.directory / instance / "fails"
        fails.mkdir(exist_ok=True)
        for number, line in enumerate(lines):
            (fails / str(number)).write_text(line)

    def sessions(self) -> list[str]:
        log = self.directory / "sessions"
        return [line.partition(" ")[0] for line in log.read_text().splitlines()] if log.exists() else []


def new_key(path: Path, comment: str = "") -> None:
    path.unlink(missing_ok=True)
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def install_cli(programs: Path) -> None:
    """The stand-in for the AWS CLI, and one for its plugin, which the first does without."""
    run = f"cd {shlex.quote(str(ROOT))} && exec {shlex.quote(sys.executable)} -m tests.aws.aws_cli"
    write_program(programs / "aws", f'{run} "$@"')
    write_program(programs / "session-manager-plugin", "exit 1")


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """A user with a key, in a home directory with an awkward name, and the stand-in for the AWS CLI on PATH."""
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("needs OpenSSH's client and sshd: apt-get install openssh-client openssh-server")
    made = Nodes(tmp_path / "nodes", tmp_path / "a home", tmp_path / "fsx" / USER)
    for directory in (made.directory, made.home / ".ssh", made.shared):
        directory.mkdir(parents=True)
    new_key(made.home / ".ssh" / "id_ed25519", "someone@somewhere")
    programs = tmp_path / "bin"
    install_cli(programs)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HOME", str(made.home))
    monkeypatch.setenv("NODES", str(made.directory))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return made
