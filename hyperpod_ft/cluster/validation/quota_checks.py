"""What AWS offers an account: instance types in the zone, and quotas of SageMaker for clusters and their instances, of
EC2 and VPC for their networks. AWS does not publish spare capacity.

Quotas are looked up by name: AWS documents the names ("Prerequisites for using SageMaker HyperPod").
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hyperpod_ft.aws.checks import account, capacity
from hyperpod_ft.aws.checks.account import ec2_type
from hyperpod_ft.aws.session import paged
from hyperpod_ft.cluster.hyperpod.request_fields import keyed_groups
from hyperpod_ft.cluster.sections import Workers
from hyperpod_ft.cluster.validation.check_input import ZONE, CheckInput
from hyperpod_ft.findings import Finding, error, warning

# The wording varies between pages of the documentation.
_PER_CLUSTER = re.compile(r"Maximum number (of )?instances allowed per SageMaker HyperPod cluster")
_ALL_CLUSTERS = re.compile(r"Total number of instances allowed across SageMaker HyperPod clusters")
_VOLUME = re.compile(r"Maximum size of EBS volume in GB for a SageMaker HyperPod cluster instance")


def zone(given: CheckInput) -> Iterator[Finding]:
    """The account has the zone, and EC2 offers the instance types there."""
    ec2, config = given.clients["ec2"], given.config
    zones = {found["ZoneId"] for found in ec2.describe_availability_zones()["AvailabilityZones"]}
    if config.availability_zone_id not in zones:
        problem = f"your account has no zone {config.availability_zone_id} in {config.region}"
        yield error(ZONE, problem, f"choose one of {', '.join(sorted(zones))}")
        return
    for key, group in keyed_groups(given.config):
        offered = _zones_with(given, group.instance_type)
        if config.availability_zone_id not in offered:
            planned = isinstance(group, Workers) and group.training_plan_arn
            where = f"EC2 offers it in {', '.join(offered)}" if offered else f"EC2 does not offer it in {config.region}"
            yield (warning if planned else error)(
                f"{key}.instance_type",
                f"{group.instance_type} is not offered in {config.availability_zone_id}",
                where if offered else f"choose another type or region: {where}",
            )


def _zones_with(given: CheckInput, instance_type: str) -> list[str]:
    wanted = {
        "LocationType": "availability-zone-id",
        "Filters": [{"Name": "instance-type", "Values": [ec2_type(instance_type)]}],
    }
    offers = paged(given.clients["ec2"], "describe_instance_type_offerings", "InstanceTypeOfferings", **wanted)
    return sorted(offer["Location"] for offer in offers)


def threads(given: CheckInput) -> Iterator[Finding]:
    """The instance types support the threads per core: not all have hyper-threading."""
    described = given.instance_types()
    for key, group in keyed_groups(given.config):
        valid = described.get(group.instance_type, {}).get("VCpuInfo", {}).get("ValidThreadsPerCore", [])
        if valid and group.threads_per_core not in valid:
            problem = f"{group.instance_type} supports {' or '.join(map(str, valid))}, not {group.threads_per_core}"
            yield error(f"{key}.threads_per_core", problem, f"set {valid[0]}")


@dataclass(frozen=True)
class _Network:
    """A quota of a network resource, and the EC2 operation that lists these resources."""

    service: str
    quota: str
    operation: str
    listed: str

    def count(self, ec2: Any) -> int:
        paged = ec2.can_paginate(self.operation)
        pages = ec2.get_paginator(self.operation).paginate() if paged else [getattr(ec2, self.operation)()]
        return sum(len(page[self.listed]) for page in pages)


_INTERFACES = _Network("vpc", "Network interfaces per Region", "describe_network_interfaces", "NetworkInterfaces")
_OF_THE_STACK = (
    _Network("vpc", "VPCs per Region", "describe_vpcs", "Vpcs"),
    _Network("vpc", "Internet gateways per Region", "describe_internet_gateways", "InternetGateways"),
    _Network("ec2", "EC2-VPC Elastic IPs", "describe_addresses", "Addresses"),
)


def of_instances(given: CheckInput) -> Iterator[Finding]:
    """The quotas for cluster usage, of which other clusters may use a part."""
    config = given.config
    limits = capacity.limits_of(given.clients["service-quotas"], "sagemaker")
    used = _used_by_others(given)
    wanted = Counter[str]()
    for group in config.groups:
        wanted[group.instance_type] += group.count
    for instance_type, count in wanted.items():
        name = f"{instance_type} for cluster usage"
        key = next(k for k, g in keyed_groups(given.config) if g.instance_type == instance_type)
        # reserved capacity has its own quotas, and AWS does not document which of them apply
        planned = any(g.training_plan_arn for g in config.workers if g.instance_type == instance_type)
        if name not in limits:
            yield warning(f"{key}.instance_type", *capacity.not_listed(name))
        elif (needed := count + used[instance_type]) > limits[name]["Value"]:
            verdict = warning if planned else error
            yield verdict(
                f"{key}.count",
                *capacity.shortfall(given.config.region, limits[name], needed, used[instance_type]),
            )
    size = sum(wanted.values())
    volume = max(group.volume_gb for group in config.groups)
    for pattern, needed, taken, key in (
        (_PER_CLUSTER, size, 0, "workers"),
        (_ALL_CLUSTERS, size + sum(used.values()), sum(used.values()), "workers"),
        (_VOLUME, volume, 0, next(f"{k}.volume_gb" for k, g in keyed_groups(given.config) if g.volume_gb == volume)),
    ):
        limit = next((limit for name, limit in limits.items() if pattern.fullmatch(name)), None)
        if limit and needed > limit["Value"]:
            yield error(key, *capacity.shortfall(given.config.region, limit, needed, taken))


def of_network(given: CheckInput) -> Iterator[Finding]:
    """The region's network quotas: the stack's resources, and an interface for each network card of a node."""
    if given.cluster():
        return  # it already has these resources
    wanted = [(_INTERFACES, account.wanted(given.place.instances))]
    if given.config.existing is None and given.stack() is None:
        wanted += [(made, 1) for made in _OF_THE_STACK]
    client = given.clients["service-quotas"]
    limits = {
        service: capacity.limits_of(client, service) for service in sorted({network.service for network, _ in wanted})
    }
    for network, more in wanted:
        key = "name" if network in _OF_THE_STACK else "workers"
        limit = limits[network.service].get(network.quota)
        if limit is None:
            yield warning(key, *capacity.not_listed(network.quota, network.service))
            continue
        taken = network.count(given.clients["ec2"])
        if taken + more > limit["Value"]:
            yield error(key, *capacity.shortfall(given.config.region, limit, taken + more, taken, "in use"))


def _used_by_others(given: CheckInput) -> Counter[str]:
    """Instances of all other clusters in the region, by type: the larger of current and target counts."""
    client = given.clients["sagemaker"]
    used: Counter[str] = Counter()
    for summary in paged(client, "list_clusters", "ClusterSummaries"):
        if summary["ClusterName"] != given.config.name:
            for group in client.describe_cluster(ClusterName=summary["ClusterName"]).get("InstanceGroups", []):
                count = max(group.get("CurrentCount", 0), group.get("TargetCount", 0))
                used[group.get("InstanceType", "")] += count
    return used
