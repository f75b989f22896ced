"""Find the user's public key, and add it to a node user's authorized_keys through SSM."""

import base64
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ft.cluster import sections
from hyperpod_ft.cluster.sections import LINUX_USER
from hyperpod_ft.cluster.ssh import ssm
from hyperpod_ft.errors import UserError

_USUAL = ("id_ed25519", "id_ecdsa", "id_rsa")
_ANSWER = "hyperpod-ft-key:"
_PUT = Path(__file__).with_name("put_key.sh")


@dataclass(frozen=True)
class SshKey:
    """`line` is the public key as a line of authorized_keys. `file` is ssh's IdentityFile: the private key, or the
    public one if the private key is only in an agent or on a token."""

    file: Path
    line: str


def find(given: Path | None, directory: Path) -> SshKey:
    """The key that the user named by its private or public file, or else the first usual one in `directory` (~/.ssh).

    Raises UserError if it does not exist or is not a public key.
    """
    if given is not None:
        private = given.with_suffix("") if given.suffix == ".pub" else given
        return _read(private.expanduser().absolute())
    for name in _USUAL:
        if directory.joinpath(f"{name}.pub").is_file():
            return _read(directory / name)
    raise UserError(
        f"no public key in {directory} ({', '.join(f'{name}.pub' for name in _USUAL)})",
        "make one with: ssh-keygen -t ed25519; or pass --identity",
    )


def _read(private: Path) -> SshKey:
    public = private.with_name(f"{private.name}.pub")
    try:
        text = public.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{public}: cannot read the public key",
            f"make it from the private one: ssh-keygen -y -f {shlex.quote(str(private))} >{shlex.quote(str(public))}",
        ) from error
    return SshKey(private if private.is_file() else public, checked(text, str(public)))


def checked(text: str, where: str) -> str:
    """The one line of a public key file. Raises UserError for anything else, which must not leave this machine."""
    lines = [line.rstrip("\r ") for line in text.split("\n") if line.strip()]
    wrong = sections.key_problem(lines[0]) if len(lines) == 1 else "must be one line"
    if wrong:
        raise UserError(f"{where}: {wrong}", "pass a public key; make one with: ssh-keygen -t ed25519")
    return lines[0]


def check_user(name: str) -> None:
    """Raises UserError for an invalid Linux user name: it goes into a configuration, and into a shell on the node."""
    if not re.fullmatch(LINUX_USER, name):
        raise UserError(f"--user {name!r}: not a Linux user name", "pass the login name of the node's user")


def command(user: str, line: str) -> str:
    """The command for the node, with the user's name and the key in base64. Raises UserError."""
    check_user(user)
    return ssm.script_command(_PUT, user, base64.b64encode(line.encode()).decode())


def upload(aws_cli: ssm.AwsCli, target: str, user: str, identity: SshKey) -> bool:
    """Add the key to the user's authorized_keys. True if it was missing. Raises UserError."""
    output = ssm.run(aws_cli, target, command(user, identity.line), _ANSWER).strip()
    match output:
        case "added" | "present":
            return output == "added"
        case "no-user":
            raise UserError(
                f"{target.rpartition('_')[2]}: no user {user} on this node",
                "pass --user; if the lifecycle scripts failed: hyperpod-ft cluster logs; to connect anyway: --ssm",
            )
        case _:
            raise UserError(
                f"{target.rpartition('_')[2]}: could not add the key to {user}'s authorized_keys: {output}",
                "connect with --ssm and check that /fsx is mounted and that the user owns the home directory",
            )
