"""Autoscaling of an inference component down to zero copies, and with them the endpoint's instances. The
requests, which are pure, and the calls that send them.

As AWS's "Scale an endpoint to zero instances": a target-tracking policy for one copy and more, and, since that metric
does not exist without copies, a step from zero at the alarm of a request that no copy could answer.
"""

from contextlib import suppress
from typing import Any

_NAMESPACE, _DIMENSION = "sagemaker", "sagemaker:inference-component:DesiredCopyCount"
# Requests to a copy in a minute that call for another copy.
_REQUESTS_PER_COPY = 60.0
_COOLDOWN_SECONDS = 300


def target(component: str, most: int) -> dict[str, Any]:
    """RegisterScalableTarget: between no copy and `most`."""
    return {**_resource(component), "MinCapacity": 0, "MaxCapacity": most}


def tracking_policy(component: str) -> dict[str, Any]:
    """PutScalingPolicy: as many copies as the requests need; none without requests."""
    return {
        **_resource(component),
        "PolicyName": f"{component}-requests",
        "PolicyType": "TargetTrackingScaling",
        "TargetTrackingScalingPolicyConfiguration": {
            "PredefinedMetricSpecification": {"PredefinedMetricType": "SageMakerInferenceComponentInvocationsPerCopy"},
            "TargetValue": _REQUESTS_PER_COPY,
            "ScaleInCooldown": _COOLDOWN_SECONDS,
            "ScaleOutCooldown": _COOLDOWN_SECONDS,
        },
    }


def step_policy(component: str) -> dict[str, Any]:
    """PutScalingPolicy: one copy more, for the alarm."""
    return {
        **_resource(component),
        "PolicyName": f"{component}-from-zero",
        "PolicyType": "StepScaling",
        "StepScalingPolicyConfiguration": {
            "AdjustmentType": "ChangeInCapacity",
            "MetricAggregationType": "Maximum",
            "Cooldown": 60,
            "StepAdjustments": [{"MetricIntervalLowerBound": 0, "ScalingAdjustment": 1}],
        },
    }


def alarm(component: str, step_policy_arn: str) -> dict[str, Any]:
    """PutMetricAlarm: a request came while there was no copy."""
    return {
        "AlarmName": alarm_name(component),
        "AlarmActions": [step_policy_arn],
        "Namespace": "AWS/SageMaker",
        "MetricName": "NoCapacityInvocationFailures",
        "Dimensions": [{"Name": "InferenceComponentName", "Value": component}],
        "Statistic": "Maximum",
        "Period": 30,
        "EvaluationPeriods": 1,
        "DatapointsToAlarm": 1,
        "Threshold": 1,
        "ComparisonOperator": "GreaterThanOrEqualToThreshold",
        "TreatMissingData": "missing",
    }


def alarm_name(component: str) -> str:
    return f"{component}-no-capacity"


def apply(autoscaling: Any, cloudwatch: Any, component: str, most: int) -> None:
    """Set all of it; what is set already is replaced by the same."""
    autoscaling.register_scalable_target(**target(component, most))
    autoscaling.put_scaling_policy(**tracking_policy(component))
    arn = autoscaling.put_scaling_policy(**step_policy(component))["PolicyARN"]
    cloudwatch.put_metric_alarm(**alarm(component, arn))


def remove(autoscaling: Any, cloudwatch: Any, component: str) -> None:
    """Delete the alarm, and the target with its policies."""
    with suppress(cloudwatch.exceptions.ResourceNotFound):
        cloudwatch.delete_alarms(AlarmNames=[alarm_name(component)])
    with suppress(autoscaling.exceptions.ObjectNotFoundException):
        autoscaling.deregister_scalable_target(**_resource(component))


def _resource(component: str) -> dict[str, str]:
    return {
        "ServiceNamespace": _NAMESPACE,
        "ResourceId": f"inference-component/{component}",
        "ScalableDimension": _DIMENSION,
    }
