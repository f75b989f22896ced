"""Where instances are to keep files: an FSx for Lustre file system, and a bucket."""

import ipaddress
from collections.abc import Iterator
from typing import Any

from hyperpod_ft.aws.checks.account import Account
from hyperpod_ft.aws.s3 import buckets
from hyperpod_ft.aws.session import answer_or_none, error_code
from hyperpod_ft.findings import Finding, error, warning

# "File system access control with Amazon VPC", FSx for Lustre user guide
LUSTRE_PORTS = ((988, 988), (1018, 1023))


def file_system(given: Account) -> list[Finding]:
    """The file system is Lustre, available, in the subnet's VPC and zone, and reachable from the nodes."""
    fsx, (key, fsx_id) = given.clients["fsx"], given.place.file_system
    answer = answer_or_none(fsx.describe_file_systems, "FileSystemNotFound", FileSystemIds=[fsx_id])
    if answer is None:
        return [error(key, f"no file system {fsx_id} in {given.place.region}", "correct the id")]
    (found,) = answer["FileSystems"]
    if found["FileSystemType"] != "LUSTRE":
        return [error(key, f"{fsx_id} is {found['FileSystemType']}, not LUSTRE", "name an FSx for Lustre file system")]
    findings = []
    if found["Lifecycle"] not in ("AVAILABLE", "UPDATING"):
        wait = "wait for it" if found["Lifecycle"] == "CREATING" else "name another file system"
        findings.append(error(key, f"{fsx_id} is {found['Lifecycle']}, not AVAILABLE", wait))
    if not found.get("LustreConfiguration", {}).get("MountName"):
        findings.append(error(key, f"FSx reports no mount name for {fsx_id}", "name another file system"))
    return [*findings, *_location(given, found), *_access(given, found)]


def _location(given: Account, found: dict[str, Any]) -> Iterator[Finding]:
    key, fsx_id = given.place.file_system
    network = given.subnet()
    if network and found.get("VpcId") not in (None, network["VpcId"]):
        problem = f"{fsx_id} is in {found['VpcId']}, the subnet in {network['VpcId']}"
        yield error(key, problem, "name a file system of the subnet's VPC")
    own = given.clients["ec2"].describe_subnets(
        Filters=[{"Name": "subnet-id", "Values": list(found.get("SubnetIds", []))}]
    )["Subnets"]
    zones = {subnet["AvailabilityZoneId"] for subnet in own}
    if zones and given.place.zone not in zones:
        yield error(
            key,
            f"{fsx_id} is in zone {', '.join(sorted(zones))}, the nodes in {given.place.zone}:"
            " traffic between zones is slow and billed",
            f"name a file system of the {given.place.what}'s zone",
        )


def _access(given: Account, found: dict[str, Any]) -> Iterator[Finding]:
    """Whether the file system's security groups allow the nodes' Lustre clients."""
    key, fsx_id = given.place.file_system
    network = given.subnet()
    if network is None:
        return
    ids = _groups_of(given, found.get("NetworkInterfaceIds", []))
    if not ids:
        problem = f"could not check whether nodes reach {fsx_id}: EC2 reports no network interfaces for it"
        yield warning(key, problem, "check that its security groups allow TCP 988 and 1018-1023 from the nodes")
        return
    rules = [rule for group in given.security_groups(ids) for rule in group["IpPermissions"]]
    closed = [
        f"{first}-{last}" if first < last else str(first)
        for first, last in LUSTRE_PORTS
        if not any(
            _covers(rule, first, last) and _from_nodes(rule, given.place.security_groups[1], network["CidrBlock"])
            for rule in rules
        )
    ]
    if not closed:
        return
    yield error(
        key,
        f"the security groups of {fsx_id} ({', '.join(ids)}) block TCP {' and '.join(closed)} from the nodes",
        f"allow TCP 988 and 1018-1023 from {given.place.security_groups[1][0]}",
    )


def _groups_of(given: Account, interface_ids: list[str]) -> list[str]:
    if not interface_ids:
        return []
    interfaces = given.clients["ec2"].describe_network_interfaces(
        Filters=[{"Name": "network-interface-id", "Values": interface_ids}]
    )["NetworkInterfaces"]
    return sorted({group["GroupId"] for interface in interfaces for group in interface["Groups"]})


def _covers(rule: dict[str, Any], first: int, last: int) -> bool:
    return rule.get("IpProtocol") == "-1" or (
        rule.get("IpProtocol") in ("tcp", "6") and rule.get("FromPort", 0) <= first and last <= rule.get("ToPort", -1)
    )


def _from_nodes(rule: dict[str, Any], groups: tuple[str, ...], cidr: str) -> bool:
    nodes = ipaddress.IPv4Network(cidr)
    if rule.get("PrefixListIds"):
        return True  # a managed list of networks: assumed to contain the nodes
    return any(pair.get("GroupId") in groups for pair in rule.get("UserIdGroupPairs", [])) or any(
        nodes.subnet_of(ipaddress.IPv4Network(block["CidrIp"])) for block in rule.get("IpRanges", [])
    )


def bucket(given: Account) -> list[Finding]:
    """The bucket exists, and is in the instances' region."""
    s3, place = given.clients["s3"], given.place
    key, called = place.bucket
    try:
        region = buckets.region(s3, called)
    except s3.exceptions.ClientError as problem:
        if error_code(problem) in ("404", "NoSuchBucket"):
            return [error(key, f"no bucket {called}", f"create it: aws s3 mb s3://{called}")]
        raise
    if not region or region == place.region:
        return []
    elsewhere = f"{called} is in {region}, the {place.what} in {place.region}"
    return [error(key, elsewhere, f"name a bucket in the {place.what}'s region")]
