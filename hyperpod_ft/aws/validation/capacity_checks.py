"""Checks of AWS's offers: instance types in the zone, threads, training plans. AWS does not publish spare capacity."""

from collections.abc import Iterator
from typing import Any

from hyperpod_ft.aws.hyperpod.request_fields import keyed_groups
from hyperpod_ft.aws.session import error_code
from hyperpod_ft.aws.validation.addresses import ec2_type
from hyperpod_ft.aws.validation.check_input import CheckInput
from hyperpod_ft.config.cluster_config import Workers
from hyperpod_ft.findings import Finding, error, warning

ZONE = "availability_zone_id"


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


def training_plans(given: CheckInput, target: str = "hyperpod-cluster") -> list[Finding]:
    """Each plan exists, is paid for, and matches the target and the groups' instance type, zone and count."""
    groups: dict[str, list[tuple[str, Workers]]] = {}
    for key, group in keyed_groups(given.config):
        if isinstance(group, Workers) and group.training_plan_arn:
            groups.setdefault(group.training_plan_arn, []).append((key, group))
    return [finding for arn, users in groups.items() for finding in _plan(given, arn, users, target)]


def _plan(given: CheckInput, arn: str, users: list[tuple[str, Workers]], target: str) -> Iterator[Finding]:
    client, name = given.clients["sagemaker"], arn.rpartition("/")[2]
    field = f"{users[0][0]}.training_plan_arn"
    try:
        plan = client.describe_training_plan(TrainingPlanName=name)
    except client.exceptions.ClientError as problem:
        if error_code(problem) not in ("ResourceNotFound", "ValidationException"):
            raise
        yield error(field, f"no training plan {name} in {given.config.region}", "correct the ARN")
        return
    if plan["Status"] == "Scheduled":
        start = f"{plan['StartTime']:%Y-%m-%d %H:%M} UTC" if "StartTime" in plan else "a later day"
        yield warning(
            field, f"training plan {name} starts on {start}", "wait until then: the instances start with the plan"
        )
    elif plan["Status"] != "Active":
        yield error(field, f"training plan {name} is {plan['Status']}", "name a plan that is Active or Scheduled")
    targets = plan.get("TargetResources", [])
    if targets and target not in targets:
        yield error(field, f"training plan {name} is for {', '.join(targets)}", f"name one for {target}")
    yield from _reserved(given, plan, users)


def _reserved(given: CheckInput, plan: dict[str, Any], users: list[tuple[str, Workers]]) -> Iterator[Finding]:
    name, reserved = plan["TrainingPlanName"], plan.get("ReservedCapacitySummaries", [])
    types = {part.get("InstanceType") for part in reserved}
    zones = {part["AvailabilityZoneId"] for part in reserved if part.get("AvailabilityZoneId")}
    for key, group in users:
        if types and group.instance_type not in types:
            problem = f"training plan {name} reserves {', '.join(sorted(map(str, types)))}, not {group.instance_type}"
            yield error(f"{key}.instance_type", problem, "set the plan's instance type, or name another plan")
    if zones and given.config.availability_zone_id not in zones:
        problem = f"training plan {name} reserves capacity in {', '.join(sorted(zones))}"
        yield error(ZONE, problem, "set the plan's zone, or name another plan")
    wanted = sum(group.count for _, group in users)
    free = plan.get("AvailableInstanceCount", plan.get("TotalInstanceCount", wanted))
    if wanted > free and given.cluster() is None:
        problem = f"training plan {name} has {free} instances left; {wanted} are requested"
        yield error(f"{users[0][0]}.count", problem, f"request {free}, or extend the plan")
