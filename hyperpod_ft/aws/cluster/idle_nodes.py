"""Choose which nodes to delete (pure)."""

from collections.abc import Mapping, Sequence

from hyperpod_ft.aws.hyperpod.api import GroupState
from hyperpod_ft.aws.hyperpod.nodes import Node
from hyperpod_ft.errors import UserError

# Slurm's states of a node without jobs, the first to go first; "planned" ones are about to run one
_WITHOUT_JOBS = ("down", "fail", "drained", "idle")


def without_jobs(group: GroupState, nodes: Sequence[Node], states: Mapping[str, str], count: int) -> list[Node]:
    """`count` nodes of a group that run no job, those that Slurm cannot use before idle ones, the newest first.

    Only nodes that are Running or have failed: the others are going already, or are not ready.
    `states`: Slurm's state by host name. Raises UserError if there are fewer, naming the others; and while more nodes
    run than the group should have, since HyperPod may list nodes as Running that it has begun to remove.
    """
    running = sum(node.group == group.name and node.running for node in nodes)
    if running > group.target:
        raise UserError(
            f"{group.name}: HyperPod is removing {running - group.target} of its {running} nodes",
            "run the command again once `hyperpod-ft cluster nodes` lists no more than the group should have",
        )
    in_group = [node for node in nodes if node.group == group.name and (node.running or node.failed)]
    free = [node for node in in_group if states.get(node.hostname) in _WITHOUT_JOBS]
    if len(free) < count:
        others = ", ".join(
            f"{node.instance_id} ({states.get(node.hostname, 'unknown to Slurm')})"
            for node in in_group
            if node not in free
        )
        raise UserError(
            f"{group.name}: {len(free)} of its nodes run no job, not {count}",
            f"wait, or name nodes whose jobs may be killed: {others or 'there are no others'}",
        )
    free.sort(key=lambda node: (_WITHOUT_JOBS.index(states[node.hostname]), -node.launched))
    return free[:count]
