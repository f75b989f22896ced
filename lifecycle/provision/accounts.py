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
    """The entries of the node's own /etc/passwd; these scripts ignore directory services."""
    rows = [line.split(":") for line in _lines(node, "passwd")]
    return [PasswdEntry(row[0], int(row[2]), int(row[3]), row[5]) for row in rows if len(row) == 7]


def account(node: Node, name: str) -> PasswdEntry:
    """Raises NodeError if there is no such user."""
    for each in accounts(node):
        if each.name == name:
            return each
    raise NodeError(f"/etc/passwd: no user {name}", "use HyperPod's AMI, which has this user")


def groups(node: Node) -> list[tuple[str, int]]:
    """Names and ids of the groups in /etc/group."""
    rows = [line.split(":") for line in _lines(node, "group")]
    return [(row[0], int(row[2])) for row in rows if len(row) == 4]


def without_shadow(node: Node, names: Sequence[str], kind: str) -> list[str]:
    """The `names` without a line in /etc/shadow (`kind` "shadow") or /etc/gshadow, if that file exists.

    A killed useradd leaves such users; PAM does not let them log in.
    """
    if not node.path(f"/etc/{kind}").exists():
        return []
    there = {line.split(":")[0] for line in _lines(node, kind)}
    return [name for name in names if name not in there]


def change(node: Node, *command: str) -> None:
    """Run useradd or a related program. Raises PassingError if it fails, for example while another one has the lock."""
    _clear_stale_locks(node)
    node.run(*command)


def as_user(user: PasswdEntry, action: Callable[[], list[str]]) -> list[str]:
    """Run `action` as that user, in a separate process, and return its result.

    Root must not touch files that users can change: their links could lead anywhere. Raises NodeError for a NodeError
    of the action and for what the user may not do, PassingError for other system errors.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        outcome: dict[str, object] = {"passing": "its process failed"}
        try:
            os.setgroups([user.gid])
            os.setgid(user.gid)
            os.setuid(user.uid)
            os.umask(0o077)
            os.environ["HOME"] = user.home
            # Something other than a file, such as a pipe, may block forever.
            signal.alarm(_USER_SECONDS)
            outcome = {"lines": action()}
        except (NodeError, PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError) as error:
            outcome = {"passing" if isinstance(error, PassingError) else "refused": str(error)}
        except Exception as error:
            outcome = {"passing": repr(error)}
        finally:
            os.write(writing, json.dumps(outcome).encode())
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
    """shadow-utils honours a lock while any process has its pid, which after a reboot may be an unrelated one."""
    etc = node.path("/etc")
    pattern = re.compile(rf"({'|'.join(_DATABASES)})\.(lock|\d+)")
    for file in sorted(file for file in etc.iterdir() if pattern.fullmatch(file.name)):
        number = "".join(character for character in file.read_text(errors="replace") if character.isdigit())
        if not _is_account_program(number):
            node.say(f"removed {file}, left by process {number}, which has ended")
            file.unlink(missing_ok=True)


def _is_account_program(number: str) -> bool:
    try:
        return Path(f"/proc/{number}/comm").read_text(errors="replace").strip() in _PROGRAMS
    except OSError:
        return False
