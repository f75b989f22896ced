"""Partitions of a HyperPod cluster: a training job must not start on nodes of another type than its own."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.slurm.site import SlurmNode

HYPERPOD = Path("/opt/sagemaker_cluster")  # exists only on HyperPod's nodes
_ALL_NODES = "dev"  # HyperPod's default partition


def check_partition(nodes: Sequence[SlurmNode], partition: str, instance_type: str) -> None:
    """Refuse a partition that may have nodes of several types, if another has nodes of one size.

    HyperPod puts all nodes into its default partition `dev`, those for login and for work without accelerators
    included. Slurm knows no instance types; nodes of one type have the same number of CPUs, but so have some of other
    types, such as m6i.32xlarge and trn1.32xlarge. So `dev` is also refused if every other partition has fewer nodes.
    `nodes`: all, once for each of their partitions. Raises UserError.
    """
    sizes: dict[str, set[int]] = defaultdict(set)
    names: dict[str, set[str]] = defaultdict(set)
    for node in nodes:
        sizes[node.partition].add(node.cpus)
        names[node.partition].add(node.name)
    others = sorted(name for name, found in sizes.items() if len(found) == 1 and name != partition)
    several = len(sizes[partition]) > 1
    if others and (several or (partition == _ALL_NODES and all(names[name] < names[partition] for name in others))):
        shown = ", ".join(map(str, sorted(sizes[partition])))
        has = f"nodes with {shown} CPUs" if several else "the nodes of all groups"
        raise UserError(
            f"cluster.partition: {partition} has {has}, so training could start on one that is not a {instance_type}",
            f"set it to the partition of the {instance_type} nodes, one of: {', '.join(others)}",
        )
