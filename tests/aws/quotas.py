"""Service Quotas of SageMaker (moto has those of VPC only).

Quota names are AWS's ("ml.trn1.32xlarge for cluster usage"). Quota codes have AWS's form (L- and eight hexadecimal
digits) and are made up: the real ones are nowhere written down reliably, so a client has to look for the name."""

import hashlib
from typing import Any

from moto.core.utils import get_service_model

from tests.aws.wire import AwsError, operation
from tests.aws.world import ACCOUNT, Region

# As a fresh account: some small instances, no accelerators but those that tests use most.
_APPLIED = {
    "ml.c5.xlarge": 20,
    "ml.c5.large": 20,
    "ml.m5.xlarge": 20,
    "ml.m5.4xlarge": 20,
    "ml.t3.medium": 20,
    "ml.trn1.32xlarge": 16,
    "ml.trn2.48xlarge": 16,
}
_WHOLE = {
    "Maximum number of instances allowed per SageMaker HyperPod cluster": 20.0,
    "Total number of instances allowed across SageMaker HyperPod clusters": 40.0,
    "Maximum size of EBS volume in GB for a SageMaker HyperPod cluster instance": 16384.0,
}


def quota(region: Region, name: str) -> float:
    """The applied value; 0 for an instance type nobody asked AWS for."""
    return {
        **_WHOLE,
        **{f"{instance_type} for cluster usage": float(count) for instance_type, count in _APPLIED.items()},
        **region.world.scenario.quotas,
    }.get(name, 0.0)


def _names() -> list[str]:
    types = get_service_model("sagemaker").shape_for("ClusterInstanceType").enum
    return sorted(f"{instance_type} for cluster usage" for instance_type in types) + sorted(_WHOLE)


def _describe(region: Region, name: str) -> dict[str, Any]:
    code = f"L-{hashlib.sha256(name.encode()).hexdigest()[:8].upper()}"
    return {
        "ServiceCode": "sagemaker",
        "ServiceName": "Amazon SageMaker",
        "QuotaArn": f"arn:aws:servicequotas:{region.name}:{ACCOUNT}:sagemaker/{code}",
        "QuotaCode": code,
        "QuotaName": name,
        "Value": quota(region, name),
        "Unit": "None",
        "Adjustable": True,
        "GlobalQuota": False,
    }


@operation("service-quotas", "ListServiceQuotas")
def list_service_quotas(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    _sagemaker(request)
    names = [n for n in _names() if request.get("QuotaCode") in (None, _describe(region, n)["QuotaCode"])]
    first, size = int(request.get("NextToken") or 0), request.get("MaxResults", 100)
    page: dict[str, Any] = {"Quotas": [_describe(region, name) for name in names[first : first + size]]}
    if first + size < len(names):
        page["NextToken"] = str(first + size)
    return page


@operation("service-quotas", "ListAWSDefaultServiceQuotas")
def list_aws_default_service_quotas(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    return list_service_quotas(region, request)


@operation("service-quotas", "GetServiceQuota")
def get_service_quota(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    _sagemaker(request)
    for name in _names():
        if (found := _describe(region, name))["QuotaCode"] == request["QuotaCode"]:
            return {"Quota": found}
    raise AwsError("NoSuchResourceException", "The request failed because the specified quota does not exist.")


def _sagemaker(request: dict[str, Any]) -> None:
    if request["ServiceCode"] != "sagemaker":
        raise AwsError("NoSuchResourceException", "This stand-in has the quotas of sagemaker only")
