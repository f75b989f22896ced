"""Checks of AWS's offers: instance types in the zone, threads. AWS does not publish spare capacity."""

from collections.abc import Iterator

from hyperpod_ft.aws.checks.account import ec2_type
from hyperpod_ft.cluster.hyperpod.request_fields import keyed_groups
from hyperpod_ft.cluster.sections import Workers
from hyperpod_ft.cluster.validation.check_input import ZONE, CheckInput
from hyperpod_ft.findings import Finding, error, warning


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
    pages = (
        given.clients["ec2"]
        .get_paginator("describe_instance_type_offerings")
        .paginate(
            LocationType="availability-zone-id",
            Filters=[{"Name": "instance-type", "Values": [ec2_type(instance_type)]}],
        )
    )
    return sorted(offer["Location"] for page in pages for offer in page["InstanceTypeOfferings"])


def threads(given: CheckInput) -> Iterator[Finding]:
    """The instance types support the threads per core: not all have hyper-threading."""
    described = given.instance_types()
    for key, group in keyed_groups(given.config):
        valid = described.get(group.instance_type, {}).get("VCpuInfo", {}).get("ValidThreadsPerCore", [])
        if valid and group.threads_per_core not in valid:
            problem = f"{group.instance_type} supports {' or '.join(map(str, valid))}, not {group.threads_per_core}"
            yield error(f"{key}.threads_per_core", problem, f"set {valid[0]}")
