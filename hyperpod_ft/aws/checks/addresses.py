"""The number of IP addresses that instances take in their subnet.

A node of a Slurm cluster takes one for each network card: 32 for a P5 ("Prerequisites for using SageMaker HyperPod" in
the SageMaker developer guide, which gives 81 for the other orchestrator, EKS).
"""

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hyperpod_ft.config.instances import CATALOGUE

RESERVED_BY_AWS = 5  # of every subnet: the first four addresses and the last ("Subnet CIDR blocks", VPC user guide)


@dataclass(frozen=True)
class Instances:
    """Instances of one type, and the keys by which the user asked for them."""

    instance_type: str  # with `ml.`
    count: int
    type_key: str
    count_key: str
    training_plan: str = ""  # ARN
    plan_key: str = ""


def ec2_type(instance_type: str) -> str:
    """`ml.trn1.32xlarge` -> `trn1.32xlarge`."""
    return instance_type.removeprefix("ml.")


def network_cards(instance_type: str) -> int:
    """EFA sits on each network card of an instance type; 1 for types that the kit's catalogue lacks."""
    instance = CATALOGUE.get(ec2_type(instance_type))
    return max(1, instance.efa) if instance else 1


def wanted(all_instances: Iterable[Instances], cards: Mapping[str, int] | None = None) -> int:
    """Addresses of all instances. `cards`: network cards by instance type (with `ml.`), as reported by EC2."""
    return sum(instances.count * _each(instances, cards) for instances in all_instances)


def usable(cidr: str) -> int:
    """The addresses of a subnet that AWS assigns."""
    return ipaddress.ip_network(cidr).num_addresses - RESERVED_BY_AWS


def breakdown(all_instances: Iterable[Instances], cards: Mapping[str, int] | None = None) -> str:
    """`2 x ml.trn1.32xlarge with 8 each`, for every type."""
    return ", ".join(f"{one.count} x {one.instance_type} with {_each(one, cards)} each" for one in all_instances)


def _each(instances: Instances, cards: Mapping[str, int] | None) -> int:
    return (cards or {}).get(instances.instance_type, network_cards(instances.instance_type))
