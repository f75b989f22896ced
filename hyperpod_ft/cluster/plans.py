"""What training plans AWS offers: capacity that is reserved for some days, and paid for in advance."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from hyperpod_ft.aws.checks.service_model import check_request
from hyperpod_ft.aws.session import Session, explained
from hyperpod_ft.errors import UserError


@dataclass(frozen=True)
class Offer:
    """A reservation that can be bought. `fee`: the price of all instances for all hours, in `currency`."""

    id: str
    instance_type: str
    instances: int
    zones: tuple[str, ...]  # ids
    start: str  # YYYY-MM-DD HH:MM, UTC; empty if AWS names none
    hours: float
    fee: float
    currency: str

    @property
    def per_instance_hour(self) -> float:
        return self.fee / max(self.instances * self.hours, 1)


def offers(
    session: Session, instance_type: str, instances: int, days: int, start: datetime | None, target: str
) -> list[Offer]:
    """The earliest first. `start`: UTC; None: at once. `target`: AWS's name for what uses the plan, such as
    `hyperpod-cluster`. Raises UserError for a type that no plan has, or when AWS refuses."""
    request: dict[str, Any] = {
        "InstanceType": f"ml.{instance_type.removeprefix('ml.')}",
        "InstanceCount": instances,
        "DurationHours": 24 * days,
        "TargetResources": [target],
    }
    for violation in check_request("sagemaker", "SearchTrainingPlanOfferings", request):
        raise UserError(f"training plans: {violation.path}: {violation.problem}", "change it")
    if start is not None:
        request["StartTimeAfter"] = start.replace(tzinfo=timezone.utc)
    with explained("training plans"):
        found = session.client("sagemaker").search_training_plan_offerings(**request)["TrainingPlanOfferings"]
        zones = session.client("ec2").describe_availability_zones()["AvailabilityZones"]
    ids = {zone["ZoneName"]: zone["ZoneId"] for zone in zones}
    return sorted(_offers(found, ids), key=lambda offer: (offer.start, offer.fee))


def _offers(found: list[dict[str, Any]], zone_ids: dict[str, str]) -> Iterator[Offer]:
    for one in found:
        reserved = one.get("ReservedCapacityOfferings", [])
        starts = [part["StartTime"].astimezone(timezone.utc) for part in reserved if "StartTime" in part]
        yield Offer(
            one["TrainingPlanOfferingId"],
            ", ".join(dict.fromkeys(part["InstanceType"] for part in reserved)),
            max((part["InstanceCount"] for part in reserved), default=0),
            tuple(
                dict.fromkeys(zone_ids.get(zone, zone) for part in reserved if (zone := part.get("AvailabilityZone")))
            ),
            f"{min(starts):%Y-%m-%d %H:%M}" if starts else "",
            one.get("DurationHours", 0) + one.get("DurationMinutes", 0) / 60,
            float(one.get("UpfrontFee", 0)),
            one.get("CurrencyCode", ""),
        )
