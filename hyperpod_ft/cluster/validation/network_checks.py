"""The network that a cluster file names under `existing`: its routes and DNS."""

from collections.abc import Iterator
from typing import Any

from hyperpod_ft.aws.checks.network import EVERYWHERE
from hyperpod_ft.cluster.validation.check_input import SUBNET, CheckInput
from hyperpod_ft.findings import Finding, error, warning


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
