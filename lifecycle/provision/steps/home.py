"""Home directories on the shared file system, at /fsx/<name>, for the default user and the cluster's users.

The first node fills a home from the default user's old one in the AMI (/etc/skel for others) and publishes it by
renaming. An existing home that is not empty is kept unchanged. The old home stays on the node.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path
from typing import Sequence

from provision import shared
from provision.accounts import PasswdEntry, account, accounts, change
from provision.errors import NodeError
from provision.node import Node
from provision.step import Step

_MODE = 0o750


class Home(Step):
    name = "home"
    needs = ("fsx", "users")

    def needed(self, node: Node) -> bool:
        return node.live

    def missing(self, node: Node) -> Sequence[str]:
        """Raises NodeError if a home belongs to another user or is not a directory."""
        known = {each.name for each in accounts(node)}
        lines = [f"no user {name}" for name in names(node) if name not in known]
        for name in (each for each in names(node) if each in known):
            user = account(node, name)
            home = home_of(node, name)
            if not _made(home, user):
                lines.append(f"no {home}")
            if user.home != str(home):
                lines.append(f"the home of {name} is {user.home}, not {home}")
        return lines

    def do(self, node: Node) -> None:
        for name in names(node):
            user = account(node, name)
            home = home_of(node, name)
            old = Path(user.home)
            if not _made(home, user):
                _make(node, home, user, old if old != home and old.is_dir() else node.path("/etc/skel"))
            if user.home != str(home):
                # Without a prefix, usermod refuses while the user has processes. They keep the old home, and where
                # HyperPod starts slurmd before these scripts, a job may run for days.
                change(node, "usermod", "--prefix", "/proc/self/root", "-d", str(home), name)


def names(node: Node) -> list[str]:
    """The users whose home is on the shared file system."""
    return list(dict.fromkeys([node.settings.default_user, *(user.name for user in node.settings.users)]))


def home_of(node: Node, name: str) -> Path:
    return node.fsx / name


def _made(home: Path, user: PasswdEntry) -> bool:
    try:
        status = home.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(status.st_mode):
        raise NodeError(f"{home} is not a directory", "move it away")
    if status.st_uid == user.uid:
        return True
    if not any(home.iterdir()):
        return False
    raise NodeError(
        f"{home} belongs to uid {status.st_uid}, but {user.name} has uid {user.uid} on this node",
        "give the user that uid in the cluster file, or chown the directory",
    )


def _make(node: Node, home: Path, user: PasswdEntry, template: Path) -> None:
    partial = shared.staging(node, f"home.{user.name}")
    partial.mkdir(mode=0o700)
    if template.is_dir():
        _copy(template, partial, user)
    os.chown(partial, user.uid, user.gid)
    partial.chmod(_MODE)
    try:
        # Also replaces an empty directory, such as one created by root.
        partial.rename(home)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shared.remove(partial)


def _copy(source: Path, target: Path, user: PasswdEntry) -> None:
    """Copy files, links and directories with modes and times, owned by the user. Only root can access `target`."""
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        to = target / entry.name
        if entry.is_symlink():
            to.symlink_to(os.readlink(entry.path))
        elif entry.is_dir():
            to.mkdir(mode=0o700)
            _copy(Path(entry.path), to, user)
            shutil.copystat(entry.path, to)
        elif entry.is_file():
            shutil.copy2(entry.path, to)
            with to.open("rb") as stream:
                os.fsync(stream.fileno())
        else:
            continue  # sockets and pipes belong to running programs
        os.chown(to, user.uid, user.gid, follow_symlinks=False)
