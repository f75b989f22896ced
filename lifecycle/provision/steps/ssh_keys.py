"""An ed25519 key pair for each user, for ssh between nodes, and the cluster file's public keys of that user.

Security: private keys are without a passphrase in homes on /fsx, so whoever can read a user's home can act as that user
on every node. Nodes are verified by their host keys (step `ssh_hosts`).

A pair is created once for the cluster. The private key is published by link(2), in which only the first node succeeds;
the public key is derived from it, so that every node writes the same one.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Callable, Sequence

from provision import files
from provision.accounts import PasswdEntry, account, accounts, as_user
from provision.errors import NodeError
from provision.node import Node
from provision.step import Step
from provision.steps.home import names

KEY = "id_ed25519"


class SshKeys(Step):
    name = "ssh_keys"
    needs = ("home",)
    deadline = 300.0

    def __init__(self) -> None:
        self._skipped: set[str] = set()
        """Users whose files this attempt (a separate process) could not fix."""

    def needed(self, node: Node) -> bool:
        return node.live

    def missing(self, node: Node) -> Sequence[str]:
        lines: list[str] = []
        made = {each.name for each in accounts(node) if Path(each.home).is_dir()}
        for name in names(node):
            lines += self._for_user(node, name, _lacking) if name in made else [f"{name} has no home"]
        return lines

    def do(self, node: Node) -> None:
        for name in names(node):
            self._for_user(node, name, _make)

    def _for_user(self, node: Node, name: str, action: Callable[[Node, PasswdEntry], list[str]]) -> list[str]:
        """Broken files or quotas of users do not fail a node; only those of the default user do."""
        if name in self._skipped:
            return []
        user = account(node, name)
        try:
            return as_user(user, partial(action, node, user))
        except NodeError as error:
            if name == node.settings.default_user:
                raise
            node.say(f"skipped: {error}")
            self._skipped.add(name)
            return []


def _lacking(node: Node, user: PasswdEntry) -> list[str]:
    """What is wrong with the user's keys. Runs as the user."""
    folder = _folder(user)
    key, public, authorized = folder / KEY, folder / f"{KEY}.pub", folder / "authorized_keys"
    if not key.exists():
        return [f"no {key}"]
    line = _public_line(node, user, key)
    # left by a killed run here; another node has since created the rest
    lines = [f"{left} was left unfinished" for left in _left(node, folder)]
    if _text(public) != line:
        lines.append(f"{public} does not match {key}")
    text = _text(authorized)
    for each in _authorized(node, user, line):
        if _with_once(text, each) != text:
            lines.append(f"{authorized} {'lacks a key' if each.split()[1] not in text else 'has a key twice'}")
    for path, mode in ((folder, 0o700), (key, 0o600), (authorized, 0o600)):
        if path.exists() and stat.S_IMODE(path.stat().st_mode) & ~mode:
            lines.append(f"{path} is open to others")
    return lines


def _make(node: Node, user: PasswdEntry) -> list[str]:
    """Runs as the user."""
    folder = _folder(user)
    folder.mkdir(mode=0o700, exist_ok=True)
    own = f".{node.identity.instance_id}"
    key = folder / KEY
    if not key.exists():
        made = folder / f"{own}.{KEY}"
        made.unlink(missing_ok=True)
        node.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", _comment(node, user), "-f", str(made))
        files.sync(made)
        with suppress(FileExistsError):  # another node has created it
            os.link(made, key)
        files.sync_directory(folder)
    for left in _left(node, folder):
        left.unlink()
    for path, mode in ((folder, 0o700), (key, 0o600)):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & mode)
    line = _public_line(node, user, key)
    _replace(folder, f"{KEY}.pub", own, line, 0o644)
    # Nodes that do this at once write the same text; only a line added by someone at that moment would be lost.
    text = _text(folder / "authorized_keys")
    for each in _authorized(node, user, line):
        text = _with_once(text, each)
    _replace(folder, "authorized_keys", own, text, 0o600)
    return []


def _left(node: Node, folder: Path) -> list[Path]:
    return sorted(folder.glob(f".{node.identity.instance_id}.*"))


def _folder(user: PasswdEntry) -> Path:
    """Raises NodeError if one of the paths is not a directory or file, which must not be followed or read."""
    folder = Path(user.home) / ".ssh"
    if os.path.lexists(folder) and not stat.S_ISDIR(folder.lstat().st_mode):
        raise NodeError(f"{folder} is not a directory", "move it away")
    for path in (folder / KEY, folder / f"{KEY}.pub", folder / "authorized_keys"):
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            raise NodeError(f"{path} is not a regular file", "move it away")
    return folder


def _public_line(node: Node, user: PasswdEntry, key: Path) -> str:
    done = node.run("ssh-keygen", "-y", "-P", "", "-f", str(key), check=False)
    fields = done.stdout.split()
    if done.returncode != 0 or len(fields) < 2:
        raise NodeError(f"{key} is not a private key without a passphrase", "move it away and run provision.sh again")
    return f"{fields[0]} {fields[1]} {_comment(node, user)}\n"


def _authorized(node: Node, user: PasswdEntry, own: str) -> list[str]:
    """The lines that authorized_keys must have: of the key pair, and of the cluster file."""
    given = [each for account in node.settings.users if account.name == user.name for each in account.public_keys]
    return [own, *(f"{each}\n" for each in given)]


def _comment(node: Node, user: PasswdEntry) -> str:
    return f"{user.name}@{node.identity.cluster}"


def _with_once(text: str, line: str) -> str:
    """`text` with the key of `line` exactly once: in its first line with that key, which may restrict it."""
    kind, blob = line.split()[:2]
    kept: list[str] = []
    found = False
    for each in text.splitlines():
        has = f"{kind} {blob}" in each and not each.lstrip().startswith("#")
        if not has or not found:
            kept.append(each + "\n")
        found = found or has
    return "".join(kept) + ("" if found else line)


def _text(path: Path) -> str:
    """Read the file; comments of keys may contain any bytes."""
    return path.read_text(encoding="utf-8", errors="surrogateescape") if path.exists() else ""


def _replace(folder: Path, name: str, own: str, text: str, mode: int) -> None:
    path = folder / name
    if not path.exists() or _text(path) != text:
        made = folder / f"{own}.{name}"
        made.write_text(text, encoding="utf-8", errors="surrogateescape")
        made.chmod(mode)
        files.sync(made)
        made.replace(path)
    if stat.S_IMODE(path.stat().st_mode) & ~mode:
        path.chmod(mode)
