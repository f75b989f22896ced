"""What an account may use: service quotas, by AWS's names of them, and training plans, which reserve capacity."""

from collections.abc import Iterator, Sequence
from typing import Any

from hyperpod_ft.aws.checks.account import Account, Instances
from hyperpod_ft.aws.session import answer_or_none, paged
from hyperpod_ft.findings import Finding, error, warning


def training_plans(given: Account, target: str) -> Iterator[Finding]:
    """Each plan exists, is paid for, and matches the target and the instances' type, zone and count.

    `target`: AWS's name for what is to use it, such as `hyperpod-cluster`.
    """
    users: dict[str, list[Instances]] = {}
    for instances in given.place.instances:
        if instances.training_plan:
            users.setdefault(instances.training_plan, []).append(instances)
    for arn, found in users.items():
        yield from _plan(given, arn, found, target)


def _plan(given: Account, arn: str, users: Sequence[Instances], target: str) -> Iterator[Finding]:
    client, name = given.clients["sagemaker"], arn.rpartition("/")[2]
    field = users[0].plan_key
    plan = answer_or_none(
        client.describe_training_plan, "ResourceNotFound", "ValidationException", TrainingPlanName=name
    )
    if plan is None:
        yield error(field, f"no training plan {name} in {given.place.region}", "correct the ARN")
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


def _reserved(given: Account, plan: dict[str, Any], users: Sequence[Instances]) -> Iterator[Finding]:
    name, reserved = plan["TrainingPlanName"], plan.get("ReservedCapacitySummaries", [])
    types = {part.get("InstanceType") for part in reserved}
    zones = {part["AvailabilityZoneId"] for part in reserved if part.get("AvailabilityZoneId")}
    for user in users:
        if types and user.instance_type not in types:
            problem = f"training plan {name} reserves {', '.join(sorted(map(str, types)))}, not {user.instance_type}"
            yield error(user.type_key, problem, "set the plan's instance type, or name another plan")
    if zones and given.place.zone and given.place.zone not in zones:
        problem = f"training plan {name} reserves capacity in {', '.join(sorted(zones))}"
        yield error(given.place.zone_key, problem, "set the plan's zone, or name another plan")
    wanted = sum(user.count for user in users)
    free = plan.get("AvailableInstanceCount", plan.get("TotalInstanceCount", wanted))
    if wanted > free and not given.has_instances():
        problem = f"training plan {name} has {free} instances left; {wanted} are requested"
        yield error(users[0].count_key, problem, f"request {free}, or extend the plan")


def shortfall(
    region: str, limit: dict[str, Any], needed: int, taken: int, by: str = "used by other clusters"
) -> tuple[str, str]:
    """The problem and the remedy of a quota that is too low."""
    others = f", {taken} of them {by}" if taken else ""
    return (
        f"quota `{limit['QuotaName']}` is {limit['Value']:g}; {needed} are needed{others}",
        f"request more: aws service-quotas request-service-quota-increase --region {region}"
        f" --service-code {limit['ServiceCode']} --quota-code {limit['QuotaCode']} --desired-value {needed}",
    )


def not_listed(name: str, service: str = "Amazon SageMaker") -> tuple[str, str]:
    """The problem and the remedy of a quota that `limits_of` has not found."""
    return (
        f"could not check its quota: Service Quotas does not list `{name}`",
        f"check the Service Quotas console, service {service}",
    )


def limits_of(client: Any, service: str) -> dict[str, dict[str, Any]]:
    """Quotas by name: the account's values, or else AWS's defaults. `client`: boto3's for service-quotas."""
    found = {}
    for operation in ("list_aws_default_service_quotas", "list_service_quotas"):
        found.update({quota["QuotaName"]: quota for quota in paged(client, operation, "Quotas", ServiceCode=service)})
    return found
