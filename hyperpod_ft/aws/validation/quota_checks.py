"""Quotas: of clusters and their instances (Service Quotas of SageMaker), and of the networks that they are in.

Codes of quotas are looked up by name: AWS documents the names ("Prerequisites for using SageMaker HyperPod").
"""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from hyperpod_ft.aws.findings import Finding, error, warning
from hyperpod_ft.aws.hyperpod.request_fields import keyed_groups
from hyperpod_ft.aws.validation import addresses
from hyperpod_ft.aws.validation.account import Account

# The words vary between pages of the documentation.
_PER_CLUSTER = re.compile(r"Maximum number (of )?instances allowed per SageMaker HyperPod cluster")
_ALL_CLUSTERS = re.compile(r"Total number of instances allowed across SageMaker HyperPod clusters")
_VOLUME = re.compile(r"Maximum size of EBS volume in GB for a SageMaker HyperPod cluster instance")


@dataclass(frozen=True)
class _Network:
    """A quota of EC2's, and the operation that lists what it limits."""

    service: str
    quota: str
    operation: str
    listed: str

    def count(self, ec2: Any) -> int:
        paged = ec2.can_paginate(self.operation)
        pages = ec2.get_paginator(self.operation).paginate() if paged else [getattr(ec2, self.operation)()]
        return sum(len(page[self.listed]) for page in pages)


_INTERFACES = _Network("vpc", "Network interfaces per Region", "describe_network_interfaces", "NetworkInterfaces")
_MADE_BY_THE_STACK = (
    _Network("vpc", "VPCs per Region", "describe_vpcs", "Vpcs"),
    _Network("vpc", "Internet gateways per Region", "describe_internet_gateways", "InternetGateways"),
    _Network("ec2", "EC2-VPC Elastic IPs", "describe_addresses", "Addresses"),
)


def quotas(account: Account) -> list[Finding]:
    """The quotas for cluster usage, of which other clusters may have taken a part."""
    config = account.config
    limits = _limits(account, "sagemaker")
    used = _used_by_others(account)
    findings = []
    wanted = Counter[str]()
    for group in config.groups:
        wanted[group.instance_type] += group.count
    for instance_type, count in wanted.items():
        name = f"{instance_type} for cluster usage"
        key = next(k for k, g in keyed_groups(account.config) if g.instance_type == instance_type)
        # reserved capacity has quotas of its own, and AWS does not document which of them count
        planned = any(g.training_plan_arn for g in config.workers if g.instance_type == instance_type)
        if name not in limits:
            remedy = "look in the Service Quotas console, service Amazon SageMaker"
            findings.append(
                warning(f"{key}.instance_type", f"could not check its quota: AWS names none of `{name}`", remedy)
            )
        elif (needed := count + used[instance_type]) > limits[name]["Value"]:
            severity = warning if planned else error
            findings.append(severity(f"{key}.count", *_short(account, limits[name], needed, used[instance_type])))
    size = sum(wanted.values())
    volume = max(group.volume_gb for group in config.groups)
    for pattern, needed, taken, key in (
        (_PER_CLUSTER, size, 0, "workers"),
        (_ALL_CLUSTERS, size + sum(used.values()), sum(used.values()), "workers"),
        (_VOLUME, volume, 0, next(f"{k}.volume_gb" for k, g in keyed_groups(account.config) if g.volume_gb == volume)),
    ):
        limit = next((limit for name, limit in limits.items() if pattern.fullmatch(name)), None)
        if limit and needed > limit["Value"]:
            findings.append(error(key, *_short(account, limit, needed, taken)))
    return findings


def network_quotas(account: Account) -> list[Finding]:
    """The quotas of the region's networks: what the stack makes, and an interface for each network card of a node."""
    if account.cluster():
        return []  # it has all this already
    wanted = [(_INTERFACES, addresses.wanted(account.config))]
    if account.config.existing is None and account.stack() is None:
        wanted += [(made, 1) for made in _MADE_BY_THE_STACK]
    limits = {service: _limits(account, service) for service in sorted({network.service for network, _ in wanted})}
    findings = []
    for network, more in wanted:
        key = "name" if network in _MADE_BY_THE_STACK else "workers"
        limit = limits[network.service].get(network.quota)
        if limit is None:
            problem = f"could not check the quota `{network.quota}`: Service Quotas does not tell it"
            findings.append(warning(key, problem, f"look in the Service Quotas console, service {network.service}"))
            continue
        taken = network.count(account.clients["ec2"])
        if taken + more > limit["Value"]:
            findings.append(error(key, *_short(account, limit, taken + more, taken, "in use")))
    return findings


def _short(
    account: Account, limit: dict[str, Any], needed: int, taken: int, by: str = "taken by other clusters"
) -> tuple[str, str]:
    others = f", {taken} of them {by}" if taken else ""
    return (
        f"quota `{limit['QuotaName']}` is {limit['Value']:g}; {needed} are needed{others}",
        f"ask AWS: aws service-quotas request-service-quota-increase --region {account.config.region} --service-code"
        f" {limit['ServiceCode']} --quota-code {limit['QuotaCode']} --desired-value {needed}",
    )


def _limits(account: Account, service: str) -> dict[str, dict[str, Any]]:
    """Quotas by name: the account's own values where there are any, AWS's defaults elsewhere."""
    client = account.clients["service-quotas"]
    found = {}
    for operation in ("list_aws_default_service_quotas", "list_service_quotas"):
        for page in client.get_paginator(operation).paginate(ServiceCode=service):
            found.update({quota["QuotaName"]: quota for quota in page["Quotas"]})
    return found


def _used_by_others(account: Account) -> Counter[str]:
    """Instances of every other cluster of the region, by type: those that it has or is about to have."""
    client = account.clients["sagemaker"]
    used: Counter[str] = Counter()
    for page in client.get_paginator("list_clusters").paginate():
        for summary in page["ClusterSummaries"]:
            if summary["ClusterName"] != account.config.name:
                for group in client.describe_cluster(ClusterName=summary["ClusterName"]).get("InstanceGroups", []):
                    count = max(group.get("CurrentCount", 0), group.get("TargetCount", 0))
                    used[group.get("InstanceType", "")] += count
    return used
