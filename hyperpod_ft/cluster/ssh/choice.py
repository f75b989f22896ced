"""Choose the node to connect to, and the user to log in as (pure)."""

from collections.abc import Sequence

from hyperpod_ft.cluster.hyperpod.api import GroupRoles, HyperPodCluster, find_node
from hyperpod_ft.cluster.hyperpod.nodes import Node, tally
from hyperpod_ft.cluster.sections import User
from hyperpod_ft.errors import UserError

IMAGE_USER = "ubuntu"


def chosen_node(
    cluster: HyperPodCluster, nodes: list[Node], roles: GroupRoles, node: str | None, group: str | None
) -> Node:
    """The node of this id or host name, or one of this group, or else one to log in to. Raises UserError."""
    if node:
        return by_name(cluster, nodes, node)
    if name := group or roles.entry:
        return in_group(cluster, nodes, name)
    names = ", ".join(known.name for known in cluster.groups)
    raise UserError(f"{cluster.name}: no login or controller group found", f"pass --group with one of: {names}")


def login_user(users: Sequence[User], public_key: str) -> str:
    """The cluster's user whose key this is; the image's own, `ubuntu`, if it has no users.

    Raises UserError if it has users and none has the key: `ubuntu`, who may use sudo, must not accept every key.
    """
    owners = [user.name for user in users if public_key.split()[1] in (key.split()[1] for key in user.public_keys)]
    if owners or not users:
        return owners[0] if owners else IMAGE_USER
    raise UserError(
        "no user of the cluster has your public key",
        f"add it to your public_keys in the cluster file, or pass --user: {', '.join(user.name for user in users)},"
        f" or {IMAGE_USER}, who may use sudo",
    )


def in_group(cluster: HyperPodCluster, nodes: list[Node], name: str) -> Node:
    """The first Running node of exactly this group. Raises UserError if there is no such group or none is Running."""
    group = cluster.group(name)
    members = [node for node in nodes if node.group == group.name]
    running = [node for node in members if node.running]
    if not running:
        others = sorted({node.group for node in nodes if node.running})
        raise UserError(
            f"{cluster.name}: no node of {name} is Running ({tally(members) or 'the group is empty'})",
            "wait for one" + (f", or pass --group with one of: {', '.join(others)}" if others else ""),
        )
    return running[0]


def by_name(cluster: HyperPodCluster, nodes: list[Node], name: str) -> Node:
    """The node of this instance id or host name. Raises UserError if it does not exist or is not Running."""
    node = find_node(nodes, name)
    if not node.running:
        why = f": {node.message}" if node.message else ""
        raise UserError(
            f"{cluster.name}: {node.instance_id} of {node.group} is {node.status}{why}",
            "wait until it is Running, or choose another node",
        )
    return node
