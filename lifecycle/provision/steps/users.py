"""The cluster file's users and groups, with the same ids on every node: files on /fsx belong to ids, not names.

A name or id that is already in use is an error that names both. Ids are never changed: existing files would keep the
old ones.
"""

from __future__ import annotations

from typing import Sequence

from provision.accounts import accounts, change, groups, without_shadow
from provision.errors import NodeError
from provision.node import Node
from provision.step import Step


class Users(Step):
    name = "users"
    # useradd fails at once while another one is running.
    attempts = 5

    def needed(self, node: Node) -> bool:
        return bool(node.settings.users)

    def missing(self, node: Node) -> Sequence[str]:
        """Raises NodeError with every contradiction to the cluster file at once."""
        contradictions = _contradictions(node)
        if contradictions:
            raise NodeError("; ".join(contradictions), "give other names or ids in the cluster file")
        users = {account.name for account in accounts(node)}
        known_groups = {name for name, _ in groups(node)}
        wanted = [user.name for user in node.settings.users]
        return [
            *(f"no group {name}" for name in wanted if name not in known_groups),
            *(f"no user {name}" for name in wanted if name not in users),
            *(
                f"{name} not in /etc/gshadow"
                for name in without_shadow(node, wanted, "gshadow")
                if name in known_groups
            ),
            *(f"{name} not in /etc/shadow" for name in without_shadow(node, wanted, "shadow") if name in users),
        ]

    def do(self, node: Node) -> None:
        known_groups = {name for name, _ in groups(node)}
        users = {account.name for account in accounts(node)}
        wanted = [user.name for user in node.settings.users]
        # Complete what a killed run left unfinished.
        if any(name in known_groups for name in without_shadow(node, wanted, "gshadow")):
            change(node, "grpconv")
        if any(name in users for name in without_shadow(node, wanted, "shadow")):
            change(node, "pwconv")
        for user in node.settings.users:
            if user.name not in known_groups:
                change(node, "groupadd", "--gid", str(user.gid), user.name)
            if user.name not in users:
                # The step home makes the directory.
                home = f"{node.settings.fsx.mount_path}/{user.name}"
                identity = ("--uid", str(user.uid), "--gid", str(user.gid))
                change(node, "useradd", *identity, "--no-create-home", "-d", home, "--shell", "/bin/bash", user.name)


def _contradictions(node: Node) -> list[str]:
    found: list[str] = []
    for user in node.settings.users:
        for account in accounts(node):
            if account.name == user.name and account.uid != user.uid:
                found.append(f"user {user.name} should have uid {user.uid} and has {account.uid} on this node")
            if account.name == user.name and account.gid != user.gid:
                found.append(f"user {user.name} should have gid {user.gid} and has {account.gid} on this node")
            if account.name != user.name and account.uid == user.uid:
                found.append(f"uid {user.uid} of user {user.name} is user {account.name}'s on this node")
        for name, gid in groups(node):
            if name == user.name and gid != user.gid:
                found.append(f"group {user.name} should have gid {user.gid} and has {gid} on this node")
            if name != user.name and gid == user.gid:
                found.append(f"gid {user.gid} of user {user.name} is group {name}'s on this node")
    return found
