"""Zones, threads per core and training plans."""

from typing import Any

import pytest

from hyperpod_ft.cluster.validation.validate import validate_account
from tests.aws.account_place import PLAN, check, clients, config, of, only, workers
from tests.aws.conftest import REGION, ZONE_ID, Aws
from tests.aws.world import ACCOUNT

ACTIVE = {
    "Status": "Active",
    "TotalInstanceCount": 4,
    "AvailableInstanceCount": 4,
    "TargetResources": ["hyperpod-cluster"],
    "ReservedCapacitySummaries": [
        {
            "ReservedCapacityArn": f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:reserved-capacity/abc",
            "InstanceType": "ml.trn1.32xlarge",
            "TotalInstanceCount": 4,
            "Status": "Active",
            "AvailabilityZoneId": ZONE_ID,
        }
    ],
}


def test_a_zone_that_the_account_does_not_have(aws: Aws) -> None:
    finding = only(check(aws, availability_zone_id="usw2-az9").findings)
    assert finding.name == "availability_zone_id"
    assert "usw2-az4" in finding.remedy


def test_a_zone_that_does_not_offer_the_instance_type(aws: Aws) -> None:
    changed = config(availability_zone_id="usw2-az1", **workers(instance_type="ml.trn2.48xlarge"))
    finding = only(validate_account(changed, clients(aws)).findings)
    assert (finding.name, finding.verdict) == ("workers.0.instance_type", "error")
    assert "EC2 offers it in usw2-az4" in finding.remedy
    changed = config(**workers(instance_type="ml.trn2.48xlarge"))
    assert validate_account(changed, clients(aws)).findings == ()


def test_threads_that_an_instance_type_does_not_have(aws: Aws) -> None:
    aws.scenario(quotas={"ml.c6g.large for cluster usage": 9})
    changed = config(controller={"instance_type": "ml.c6g.large", "threads_per_core": 2})
    finding = only(of(validate_account(changed, clients(aws)), "controller.threads_per_core"))
    assert "1, not 2" in finding.found
    assert of(check(aws, controller={"threads_per_core": 2}), finding.name) == []


@pytest.mark.parametrize(
    ("changes", "field", "verdict", "said"),
    [
        ({"Status": "Scheduled"}, "workers.0.training_plan_arn", "warning", "starts on 2027-01-01 11:30 UTC"),
        ({"Status": "Expired"}, "workers.0.training_plan_arn", "error", "is Expired"),
        ({"TargetResources": ["training-job"]}, "workers.0.training_plan_arn", "error", "is for training-job"),
        ({"AvailableInstanceCount": 1}, "workers.0.count", "error", "has 1 instances left; 2 "),
        ({"InstanceType": "ml.p5.48xlarge"}, "workers.0.instance_type", "error", "reserves ml.p5.48xlarge"),
        ({"AvailabilityZoneId": "usw2-az1"}, "availability_zone_id", "error", "capacity in usw2-az1"),
    ],
)
def test_training_plans(aws: Aws, changes: dict[str, Any], field: str, verdict: str, said: str) -> None:
    reserved = {**ACTIVE["ReservedCapacitySummaries"][0]}  # type: ignore[dict-item]
    plan: dict[str, Any] = {**ACTIVE, "ReservedCapacitySummaries": [reserved]}
    planned = config(**workers(training_plan_arn=PLAN))
    aws.scenario(training_plans={"plan-1": plan})
    assert validate_account(planned, clients(aws)).findings == ()
    for key, value in changes.items():
        (reserved if key in reserved and key != "Status" else plan)[key] = value
    aws.scenario(training_plans={"plan-1": plan})
    finding = only(validate_account(planned, clients(aws)).findings)
    assert (finding.name, finding.verdict) == (field, verdict)
    assert said in finding.found


def test_a_training_plan_that_is_not_there(aws: Aws) -> None:
    finding = only(check(aws, **workers(training_plan_arn=PLAN)).findings)
    assert "no training plan plan-1" in finding.found


def test_too_little_quota_is_a_warning_where_capacity_is_reserved(aws: Aws) -> None:
    aws.scenario(training_plans={"plan-1": ACTIVE}, quotas={"ml.trn1.32xlarge for cluster usage": 0})
    finding = only(check(aws, **workers(training_plan_arn=PLAN)).findings)
    assert finding.verdict == "warning"
