"""Checks the subnet and security groups that instances will use."""

from collections.abc import Iterator
from typing import Any

from hyperpod_ft.aws.checks import account
from hyperpod_ft.aws.checks.account import Account
from hyperpod_ft.findings import Finding, error

EVERYWHERE = "0.0.0.0/0"


def subnet(given: Account) -> list[Finding]:
    """The subnet exists, is in the instances' zone, and has addresses for all of them."""
    found = given.subnet()
    if found is None:
        key, subnet_id = given.place.subnet
        return [error(key, f"no subnet {subnet_id} in {given.place.region}", "correct the id")]
    return [*_zone(given, found), *_addresses(given, found)]


def _zone(given: Account, found: dict[str, Any]) -> Iterator[Finding]:
    place = given.place
    if found["AvailabilityZoneId"] == place.zone:
        return
    yield error(
        place.subnet.key,
        f"{found['SubnetId']} is in zone {found['AvailabilityZoneId']}, the {place.what} in {place.zone}",
        f"name a subnet of the {place.what}'s zone" + (f", or change {place.zone_key}" if place.zone_key else ""),
    )


def _addresses(given: Account, found: dict[str, Any]) -> Iterator[Finding]:
    if given.has_instances():
        return  # they already have their addresses
    cards = {
        name: described.get("NetworkInfo", {}).get("MaximumNetworkCards", 1)
        for name, described in given.instance_types().items()
    }
    wanted, free = account.wanted(given.place.instances, cards), found["AvailableIpAddressCount"]
    if wanted <= free:
        return
    yield error(
        given.place.subnet.key,
        f"{found['SubnetId']} has {free} free IP addresses; the nodes need {wanted}"
        f" ({account.breakdown(given.place.instances, cards)})",
        "reduce the number of nodes, or name a larger subnet",
    )


def security_groups(given: Account) -> list[Finding]:
    """The groups exist in the subnet's VPC and allow all traffic among their members, as EFA and Slurm require.

    "Prerequisites for using SageMaker HyperPod": all traffic in and out, from and to the group itself. With EFA that
    goes for each group, or HyperPod's health checks of EFA fail on every node; otherwise one is enough.
    """
    key, ids = given.place.security_groups
    found = given.security_groups(ids)
    here = {group["GroupId"] for group in found}
    findings = [
        error(key, f"no security group {missing} in {given.place.region}", "correct the id")
        for missing in ids
        if missing not in here
    ]
    network = given.subnet()
    if network:
        findings += [
            error(
                key,
                f"{group['GroupId']} is in {group['VpcId']}, the subnet in {network['VpcId']}",
                "name groups and a subnet of one VPC",
            )
            for group in found
            if group["VpcId"] != network["VpcId"]
        ]
    return [*findings, *_self_rules(given, found)]


def _self_rules(given: Account, groups: list[dict[str, Any]]) -> Iterator[Finding]:
    efa = any(described.get("NetworkInfo", {}).get("EfaSupported") for described in given.instance_types().values())
    lacking = []
    for group in groups:
        inward = _allows_itself(group, "IpPermissions")
        outward = _allows_itself(group, "IpPermissionsEgress") or (not efa and _allows_everywhere(group))
        if inward and outward and not efa:
            return
        lacking += [(group["GroupId"], way) for way, there in (("inbound", inward), ("outbound", outward)) if not there]
    for group_id, way in lacking:
        yield error(
            given.place.security_groups[0],
            f"{group_id} has no {way} rule for all traffic {'from' if way == 'inbound' else 'to'} itself, so nodes"
            " cannot reach each other" + (" over EFA" if efa else ""),
            f"aws ec2 authorize-security-group-{'ingress' if way == 'inbound' else 'egress'} --region"
            f" {given.place.region} --group-id {group_id} --ip-permissions"
            f" 'IpProtocol=-1,UserIdGroupPairs=[{{GroupId={group_id}}}]'",
        )


def _allows_itself(group: dict[str, Any], direction: str) -> bool:
    return any(
        rule.get("IpProtocol") == "-1"
        and any(pair.get("GroupId") == group["GroupId"] for pair in rule.get("UserIdGroupPairs", []))
        for rule in group.get(direction, [])
    )


def _allows_everywhere(group: dict[str, Any]) -> bool:
    return any(
        rule.get("IpProtocol") == "-1" and any(r.get("CidrIp") == EVERYWHERE for r in rule.get("IpRanges", []))
        for rule in group.get("IpPermissionsEgress", [])
    )
