"""The FSx for Lustre file system that a cluster file names under `existing`."""

import ipaddress
from collections.abc import Iterator
from typing import Any

from hyperpod_ft.aws.session import error_code
from hyperpod_ft.aws.validation.check_input import CheckInput
from hyperpod_ft.findings import Finding, error, warning

FSX = "existing.fsx_id"
# "File system access control with Amazon VPC", FSx for Lustre user guide
LUSTRE_PORTS = ((988, 988), (1018, 1023))


def file_system(given: CheckInput) -> list[Finding]:
    """The file system is Lustre, available, in the subnet's VPC and zone, and reachable from the nodes."""
    fsx, fsx_id = given.clients["fsx"], given.existing.fsx_id
    try:
        (found,) = fsx.describe_file_systems(FileSystemIds=[fsx_id])["FileSystems"]
    except fsx.exceptions.ClientError as problem:
        if error_code(problem) == "FileSystemNotFound":
            return [error(FSX, f"no file system {fsx_id} in {given.config.region}", "correct the id")]
        raise
    if found["FileSystemType"] != "LUSTRE":
        return [error(FSX, f"{fsx_id} is {found['FileSystemType']}, not LUSTRE", "name an FSx for Lustre file system")]
    findings = []
    if found["Lifecycle"] not in ("AVAILABLE", "UPDATING"):
        wait = "wait for it" if found["Lifecycle"] == "CREATING" else "name another file system"
        findings.append(error(FSX, f"{fsx_id} is {found['Lifecycle']}, not AVAILABLE", wait))
    if not found.get("LustreConfiguration", {}).get("MountName"):
        findings.append(error(FSX, f"FSx reports no mount name for {fsx_id}", "name another file system"))
    return [*findings, *_location(given, found), *_access(given, found)]


def _location(given: CheckInput, found: dict[str, Any]) -> Iterator[Finding]:
    fsx_id, network = found["FileSystemId"], given.subnet()
    if network and found.get("VpcId") not in (None, network["VpcId"]):
        problem = f"{fsx_id} is in {found['VpcId']}, the subnet in {network['VpcId']}"
        yield error(FSX, problem, "name a file system of the subnet's VPC")
    own = given.clients["ec2"].describe_subnets(
        Filters=[{"Name": "subnet-id", "Values": list(found.get("SubnetIds", []))}]
    )["Subnets"]
    zones = {subnet["AvailabilityZoneId"] for subnet in own}
    if zones and given.config.availability_zone_id not in zones:
        yield error(
            FSX,
            f"{fsx_id} is in zone {', '.join(sorted(zones))}, the nodes in {given.config.availability_zone_id}:"
            " traffic between zones is slow and billed",
            "name a file system of the cluster's zone",
        )


def _access(given: CheckInput, found: dict[str, Any]) -> Iterator[Finding]:
    """Whether the file system's security groups allow the nodes' Lustre clients."""
    fsx_id, network = found["FileSystemId"], given.subnet()
    if network is None:
        return
    ids = _groups_of(given, found.get("NetworkInterfaceIds", []))
    if not ids:
        problem = f"could not check whether nodes reach {fsx_id}: EC2 reports no network interfaces for it"
        yield warning(FSX, problem, "check that its security groups allow TCP 988 and 1018-1023 from the nodes")
        return
    rules = [rule for group in given.security_groups(ids) for rule in group["IpPermissions"]]
    closed = [
        f"{first}-{last}" if first < last else str(first)
        for first, last in LUSTRE_PORTS
        if not any(
            _covers(rule, first, last) and _from_nodes(rule, given.existing.security_group_ids, network["CidrBlock"])
            for rule in rules
        )
    ]
    if not closed:
        return
    yield error(
        FSX,
        f"the security groups of {fsx_id} ({', '.join(ids)}) block TCP {' and '.join(closed)} from the nodes",
        f"allow TCP 988 and 1018-1023 from {given.existing.security_group_ids[0]}",
    )


def _groups_of(given: CheckInput, interface_ids: list[str]) -> list[str]:
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
