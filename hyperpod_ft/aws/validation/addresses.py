"""The number of IP addresses that a cluster takes in its subnet.

A node of a Slurm cluster takes one for each network card: 32 for a P5 ("Prerequisites for using SageMaker HyperPod" in
the SageMaker developer guide, which gives 81 for the other orchestrator, EKS).
"""

import ipaddress

from hyperpod_ft.config.cluster_config import ClusterConfig
from hyperpod_ft.config.instances import CATALOGUE

RESERVED_BY_AWS = 5  # of every subnet: the first four addresses and the last ("Subnet CIDR blocks", VPC user guide)


def ec2_type(instance_type: str) -> str:
    """`ml.trn1.32xlarge` -> `trn1.32xlarge`."""
    return instance_type.removeprefix("ml.")


def network_cards(instance_type: str) -> int:
    """EFA sits on each network card of an instance type; 1 for types that the kit's catalogue lacks."""
    instance = CATALOGUE.get(ec2_type(instance_type))
    return max(1, instance.efa) if instance else 1


def wanted(config: ClusterConfig, cards: dict[str, int] | None = None) -> int:
    """Addresses of all nodes. `cards`: network cards by instance type (with `ml.`), as reported by EC2."""
    counted = cards or {}
    return sum(
        group.count * counted.get(group.instance_type, network_cards(group.instance_type)) for group in config.groups
    )


def usable(cidr: str) -> int:
    """The addresses of a subnet that AWS assigns."""
    return ipaddress.ip_network(cidr).num_addresses - RESERVED_BY_AWS


def breakdown(config: ClusterConfig, cards: dict[str, int] | None = None) -> str:
    """`2 x ml.trn1.32xlarge with 8 each`, for every group."""
    counted = cards or {}
    parts = [
        f"{group.count} x {group.instance_type} with "
        f"{counted.get(group.instance_type, network_cards(group.instance_type))} each"
        for group in config.groups
    ]
    return ", ".join(parts)
