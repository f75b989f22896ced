"""The network that a cluster file names under `existing`: subnet, routes, DNS, security groups."""

from collections.abc import Iterator
from typing import Any

from hyperpod_ft.aws.validation import addresses
from hyperpod_ft.aws.validation.check_input import CheckInput
from hyperpod_ft.findings import Finding, error, warning

SUBNET, GROUPS = "existing.subnet_id", "existing.security_group_ids"
EVERYWHERE = "0.0.0.0/0"


def subnet(given: CheckInput) -> list[Finding]:
    """The subnet exists, is in the cluster's zone, and has addresses for all nodes."""
    found = given.subnet()
    if found is None:
        return [error(SUBNET, f"no subnet {given.existing.subnet_id} in {given.config.region}", "correct the id")]
    return [*_zone(given, found), *_addresses(given, found)]


def _zone(given: CheckInput, found: dict[str, Any]) -> Iterator[Finding]:
    if found["AvailabilityZoneId"] == given.config.availability_zone_id:
        return
    yield error(
        SUBNET,
        f"{found['SubnetId']} is in zone {found['AvailabilityZoneId']}, the cluster in"
        f" {given.config.availability_zone_id}",
        "name a subnet of the cluster's zone, or change availability_zone_id",
    )


def _addresses(given: CheckInput, found: dict[str, Any]) -> Iterator[Finding]:
    if given.cluster():
        return  # its nodes already have their addresses
    cards = {
        name: described.get("NetworkInfo", {}).get("MaximumNetworkCards", 1)
        for name, described in given.instance_types().items()
    }
    wanted, free = addresses.wanted(given.config, cards), found["AvailableIpAddressCount"]
    if wanted <= free:
        return
    yield error(
        SUBNET,
        f"{found['SubnetId']} has {free} free IP addresses; the nodes need {wanted}"
        f" ({addresses.breakdown(given.config, cards)})",
        "reduce the number of nodes, or name a larger subnet",
    )


def routes(given: CheckInput) -> Iterator[Finding]:
    """The subnet is private, and its nodes reach S3 and package repositories."""
    found = given.subnet()
    if found is None:
        return  # reported by `subnet`
    table = _route_table(given, found)
    active = [route for route in table["Routes"] if route.get("State") != "blackhole"]
    if gateway := next((r["GatewayId"] for r in active if r.get("GatewayId", "").startswith("igw-")), None):
        yield error(
            SUBNET,
            f"{found['SubnetId']} is public: {table['RouteTableId']} routes to {gateway}; HyperPod gives its nodes"
            " no public addresses",
            "name a subnet with a route to a NAT gateway instead",
        )
        return
    if any(route.get("DestinationCidrBlock") == EVERYWHERE for route in active):
        return
    if _reaches_s3(given, found["VpcId"], table["RouteTableId"]):
        yield warning(
            SUBNET,
            f"{found['SubnetId']} reaches only S3: {table['RouteTableId']} has no route to {EVERYWHERE}",
            "add a NAT gateway, or provide packages and models in S3",
        )
        return
    yield error(
        SUBNET,
        f"{found['SubnetId']} has no outbound route: {table['RouteTableId']} has no route to {EVERYWHERE} and"
        " no S3 endpoint, so nodes cannot download their lifecycle scripts",
        "add a NAT gateway, or a gateway endpoint for S3",
    )


def names(given: CheckInput) -> Iterator[Finding]:
    """The VPC resolves DNS names: nodes mount FSx by its name."""
    found = given.subnet()
    if found is None:
        return  # reported by `subnet`
    off = []
    for attribute, key in (("enableDnsSupport", "EnableDnsSupport"), ("enableDnsHostnames", "EnableDnsHostnames")):
        answer = given.clients["ec2"].describe_vpc_attribute(VpcId=found["VpcId"], Attribute=attribute)
        if not answer[key]["Value"]:
            off.append(attribute)
    if not off:
        return
    remedy = " and ".join(
        f"aws ec2 modify-vpc-attribute --region {given.config.region} --vpc-id {found['VpcId']} --{option}"
        for option in ("enable-dns-support", "enable-dns-hostnames")
        if option.replace("-", "") in [attribute.lower() for attribute in off]
    )
    yield error(
        SUBNET,
        f"{found['VpcId']} has {' and '.join(off)} off, so nodes cannot resolve the file system's name",
        remedy,
    )


def _route_table(given: CheckInput, found: dict[str, Any]) -> dict[str, Any]:
    """The subnet's own route table, or its VPC's main one."""
    ec2 = given.clients["ec2"]
    own = [{"Name": "association.subnet-id", "Values": [found["SubnetId"]]}]
    main = [{"Name": "vpc-id", "Values": [found["VpcId"]]}, {"Name": "association.main", "Values": ["true"]}]
    tables = ec2.describe_route_tables(Filters=own)["RouteTables"]
    table: dict[str, Any] = (tables or ec2.describe_route_tables(Filters=main)["RouteTables"])[0]
    return table


def _reaches_s3(given: CheckInput, vpc_id: str, table_id: str) -> bool:
    endpoints = given.clients["ec2"].describe_vpc_endpoints(
        Filters=[
            {"Name": "vpc-id", "Values": [vpc_id]},
            {"Name": "service-name", "Values": [f"com.amazonaws.{given.config.region}.s3"]},
        ]
    )["VpcEndpoints"]
    return any(
        endpoint.get("State", "available").lower() == "available"
        and (endpoint.get("VpcEndpointType") == "Interface" or table_id in endpoint.get("RouteTableIds", []))
        for endpoint in endpoints
    )


def security_groups(given: CheckInput) -> list[Finding]:
    """The groups exist in the subnet's VPC and allow all traffic among their members, as EFA and Slurm require.

    "Prerequisites for using SageMaker HyperPod": all traffic in and out, from and to the group itself. With EFA that
    goes for each group, or HyperPod's health checks of EFA fail on every node; otherwise one is enough.
    """
    ids = list(given.existing.security_group_ids)
    found = given.security_groups(ids)
    here = {group["GroupId"] for group in found}
    findings = [
        error(GROUPS, f"no security group {missing} in {given.config.region}", "correct the id")
        for missing in ids
        if missing not in here
    ]
    network = given.subnet()
    if network:
        findings += [
            error(
                GROUPS,
                f"{group['GroupId']} is in {group['VpcId']}, the subnet in {network['VpcId']}",
                "name groups and a subnet of one VPC",
            )
            for group in found
            if group["VpcId"] != network["VpcId"]
        ]
    return [*findings, *_self_rules(given, found)]


def _self_rules(given: CheckInput, groups: list[dict[str, Any]]) -> Iterator[Finding]:
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
            GROUPS,
            f"{group_id} has no {way} rule for all traffic {'from' if way == 'inbound' else 'to'} itself, so nodes"
            " cannot reach each other" + (" over EFA" if efa else ""),
            f"aws ec2 authorize-security-group-{'ingress' if way == 'inbound' else 'egress'} --region"
            f" {given.config.region} --group-id {group_id} --ip-permissions"
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
