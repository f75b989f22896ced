"""Homes on the shared file system, at /fsx/<name>: the default user's and the cluster's users'.

The first node fills a home with what the AMI put in the default user's old one (/etc/skel for others) and publishes it
by renaming; whatever home is there already, with anything in it, stays as it is. The old home stays on the node.
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
        """Raises NodeError when a home is another's, or no directory."""
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
                # Only with a prefix does usermod not refuse while the user runs something: what runs keeps the old
                # home, and where HyperPod starts slurmd before these scripts a job may run for days.
                change(node, "usermod", "--prefix", "/proc/self/root", "-d", str(home), name)


def names(node: Node) -> list[str]:
    """Everybody whose home is on the shared file system."""
    return list(dict.fromkeys([node.settings.default_user, *(user.name for user in node.settings.users)]))


def home_of(node: Node, name: str) -> Path:
    return node.fsx / name


def _made(home: Path, user: PasswdEntry) -> bool:
    try:
        status = home.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(status.st_mode):
        raise NodeError(f"{home} is no directory", "move it away")
    if status.st_uid == user.uid:
        return True
    if not any(home.iterdir()):
        return False
    raise NodeError(
        f"{home} belongs to uid {status.st_uid}, and {user.name} has uid {user.uid} on this node",
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
        # Takes the place of an empty directory too, such as one that root made.
        partial.rename(home)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shared.remove(partial)


def _copy(source: Path, target: Path, user: PasswdEntry) -> None:
    """Files, links and directories, with their modes and times, for the user. `target` is there and is root's alone."""
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
            continue  # sockets and pipes belong to programs that run here
        os.chown(to, user.uid, user.gid, follow_symlinks=False)
