"""SageMaker training plans, which moto lacks; the scenario defines them."""

from datetime import datetime, timezone
from typing import Any

from tests.aws.wire import AwsError, operation
from tests.aws.world import ACCOUNT, Region


@operation("sagemaker", "DescribeTrainingPlan")
def describe_training_plan(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    name = request["TrainingPlanName"]
    if name not in region.world.scenario.training_plans:
        raise AwsError("ResourceNotFound", f"Training plan {name} not found")
    plan = dict(region.world.scenario.training_plans[name])
    return {
        "TrainingPlanArn": f"arn:aws:sagemaker:{region.name}:{ACCOUNT}:training-plan/{name}",
        "TrainingPlanName": name,
        "StartTime": datetime(2027, 1, 1, 11, 30, tzinfo=timezone.utc),
        **plan,
    }


@operation("sagemaker", "SearchTrainingPlanOfferings")
def search_training_plan_offerings(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    fitting = [
        one
        for one in region.world.scenario.plan_offerings
        if request.get("TargetResources", one["TargetResources"])[0] in one["TargetResources"]
        and one["DurationHours"] == request["DurationHours"]
        and all(
            part["InstanceType"] == request["InstanceType"]
            and part["InstanceCount"] >= request["InstanceCount"]
            and part["StartTime"] >= request.get("StartTimeAfter", 0)
            for part in one["ReservedCapacityOfferings"]
        )
    ]
    return {"TrainingPlanOfferings": fitting}
