"""The accounts of a node: /etc/passwd and /etc/group as they are, and the programs that change them."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Sequence

from provision.errors import NodeError, PassingError
from provision.node import Node

_USER_SECONDS = 30
_DATABASES = ("passwd", "group", "shadow", "gshadow", "subuid", "subgid")
_PROGRAMS = (
    *("useradd", "usermod", "userdel", "groupadd", "groupmod", "groupdel", "groupmems", "newusers"),
    *("passwd", "gpasswd", "chpasswd", "chgpasswd", "chage", "chfn", "chsh", "vipw", "vigr"),
    *("pwck", "grpck", "pwconv", "pwunconv", "grpconv", "grpunconv"),
)


@dataclass(frozen=True)
class PasswdEntry:
    """A line of /etc/passwd."""

    name: str
    uid: int
    gid: int
    home: str


def accounts(node: Node) -> list[PasswdEntry]:
    """Those of the node's own files; what a directory service would add is none of these scripts' business."""
    rows = [line.split(":") for line in _lines(node, "passwd")]
    return [PasswdEntry(row[0], int(row[2]), int(row[3]), row[5]) for row in rows if len(row) == 7]


def account(node: Node, name: str) -> PasswdEntry:
    """Raises NodeError when there is no such user."""
    for each in accounts(node):
        if each.name == name:
            return each
    raise NodeError(f"/etc/passwd: no user {name}", "the AMI should have it: this is another AMI than HyperPod's")


def groups(node: Node) -> list[tuple[str, int]]:
    """Names and ids of the groups in /etc/group."""
    rows = [line.split(":") for line in _lines(node, "group")]
    return [(row[0], int(row[2])) for row in rows if len(row) == 4]


def without_shadow(node: Node, names: Sequence[str], kind: str) -> list[str]:
    """Those of `names` that lack a line of /etc/shadow (`kind` "shadow") or /etc/gshadow, where there is that file.

    A useradd that was killed leaves such users; PAM does not let them in.
    """
    if not node.path(f"/etc/{kind}").exists():
        return []
    there = {line.split(":")[0] for line in _lines(node, kind)}
    return [name for name in names if name not in there]


def change(node: Node, *command: str) -> None:
    """Run useradd and its kin. Raises PassingError when that fails, for example while another one holds the lock."""
    _clear_stale_locks(node)
    node.run(*command)


def as_user(user: PasswdEntry, action: Callable[[], list[str]]) -> list[str]:
    """What `action` returns when it is run by that user, in a process that is nobody else.

    Root does not touch what users can change: links there could lead it anywhere. Raises NodeError for what the action
    raised as such and for what the user may not do, PassingError for other errors of the system.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said: dict[str, object] = {"passing": "its process failed"}
        try:
            os.setgroups([user.gid])
            os.setgid(user.gid)
            os.setuid(user.uid)
            os.umask(0o077)
            os.environ["HOME"] = user.home
            # A pipe, or a file without end, in the place of a file.
            signal.alarm(_USER_SECONDS)
            said = {"lines": action()}
        except (NodeError, PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError) as error:
            said = {"passing" if isinstance(error, PassingError) else "refused": str(error)}
        except Exception as error:
            said = {"passing": repr(error)}
        finally:
            os.write(writing, json.dumps(said).encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    result = json.loads(answer or b'{"passing": "its process was killed"}')
    if "refused" in result:
        raise NodeError(f"{user.name}: {result['refused']}")
    if "passing" in result:
        raise PassingError(f"{user.name}: {result['passing']}")
    return [str(line) for line in result["lines"]]


def _lines(node: Node, database: str) -> list[str]:
    return node.path(f"/etc/{database}").read_text(errors="surrogateescape").splitlines()


def _clear_stale_locks(node: Node) -> None:
    """shadow-utils takes a lock for alive while any process has the number in it, as may be after a reboot."""
    etc = node.path("/etc")
    pattern = re.compile(rf"({'|'.join(_DATABASES)})\.(lock|\d+)")
    for file in sorted(file for file in etc.iterdir() if pattern.fullmatch(file.name)):
        number = "".join(character for character in file.read_text(errors="replace") if character.isdigit())
        if not _is_account_program(number):
            node.say(f"removed {file}, left by process {number}, which is gone")
            file.unlink(missing_ok=True)


def _is_account_program(number: str) -> bool:
    try:
        return Path(f"/proc/{number}/comm").read_text(errors="replace").strip() in _PROGRAMS
    except OSError:
        return False
