"""Partitions of a HyperPod cluster: a training job must not start on nodes of another type than its own."""

from collections import defaultdict
from pathlib import Path

from hyperpod_ft.errors import UserError

HYPERPOD = Path("/opt/sagemaker_cluster")  # exists only on HyperPod's nodes
_ALL_NODES = "dev"  # HyperPod's default partition


def check_partition(listing: str, partition: str | None, instance_type: str) -> None:
    """Refuse a partition that may have nodes of several types, if another has nodes of one size.

    HyperPod puts all nodes into its default partition `dev`, those for login and for work without accelerators
    included. Slurm knows no instance types; nodes of one type have the same number of CPUs, but so have some of other
    types, such as m6i.32xlarge and trn1.32xlarge. So `dev` is also refused if every other partition has fewer nodes.
    `listing`: a line `PARTITION|CPUS|NODE` for each node in a partition, with * behind the default; `partition`: None
    for that one. Raises UserError.
    """
    sizes: dict[str, set[int]] = defaultdict(set)
    nodes: dict[str, set[str]] = defaultdict(set)
    default = ""
    for line in listing.splitlines():
        name, cpus, node = line.split("|")
        if name.endswith("*"):
            name = default = name.removesuffix("*")
        sizes[name].add(int(cpus))
        nodes[name].add(node)
    chosen = partition or default
    others = sorted(name for name, found in sizes.items() if len(found) == 1 and name != chosen)
    several = len(sizes[chosen]) > 1
    if others and (several or (chosen == _ALL_NODES and all(nodes[name] < nodes[chosen] for name in others))):
        has = f"nodes with {', '.join(map(str, sorted(sizes[chosen])))} CPUs" if several else "the nodes of all groups"
        raise UserError(
            f"cluster.partition: {chosen} has {has}, so training could start on one that is not a {instance_type}",
            f"set it to the partition of the {instance_type} nodes, one of: {', '.join(others)}",
        )
