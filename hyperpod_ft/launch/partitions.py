"""Partitions of a HyperPod cluster: a training job must not start on nodes of another type than its own."""

from collections import defaultdict
from pathlib import Path

from hyperpod_ft.errors import UserError

HYPERPOD = Path("/opt/sagemaker_cluster")  # exists only on HyperPod's nodes


def check_partition(listing: str, partition: str | None, instance_type: str) -> None:
    """Refuse a partition with nodes of different sizes, if another has nodes of one size.

    HyperPod puts all nodes into its default partition `dev`, those for login and for work without accelerators
    included. Slurm knows no instance types; nodes of one type have the same number of CPUs. `listing`: a line
    `PARTITION|CPUS` for each size of node in a partition, with * behind the default; `partition`: None for that one.
    Raises UserError.
    """
    sizes: dict[str, set[int]] = defaultdict(set)
    default = ""
    for line in listing.splitlines():
        name, _, cpus = line.partition("|")
        if name.endswith("*"):
            name = default = name.removesuffix("*")
        sizes[name].add(int(cpus))
    chosen = partition or default
    others = sorted(name for name, found in sizes.items() if len(found) == 1)
    if len(sizes[chosen]) > 1 and others:
        cpus_of_nodes = ", ".join(map(str, sorted(sizes[chosen])))
        raise UserError(
            f"cluster.partition: {chosen} has nodes with {cpus_of_nodes} CPUs, so training could start on one that is"
            f" not a {instance_type}",
            f"set it to the partition of the {instance_type} nodes, one of: {', '.join(others)}",
        )
