"""Service Quotas of SageMaker (moto has those of VPC only), and AWS's defaults of a region's networks.

Quota names are AWS's ("ml.trn1.32xlarge for cluster usage"). Quota codes have AWS's form (L- and eight hexadecimal
digits) and are invented: AWS does not document the real ones reliably, so a client has to search by name."""

import hashlib
from typing import Any

from moto.core.utils import get_service_model

from tests.aws.wire import AwsError, operation
from tests.aws.world import ACCOUNT, Region

# As in a new account: some small instances, and no accelerators except those that tests use most.
_APPLIED = {
    "ml.c5.xlarge": 20,
    "ml.c5.large": 20,
    "ml.m5.xlarge": 20,
    "ml.m5.4xlarge": 20,
    "ml.t3.medium": 20,
    "ml.trn1.32xlarge": 16,
    "ml.trn2.48xlarge": 16,
}
_OF_JOBS = ("ml.c7i.xlarge", "ml.c7i.4xlarge", "ml.m5.large")
# of the instances of jobs and endpoints, those that the tests use: AWS lists thousands, each validation reads them all
_FAMILIES = ("c5", "c7i", "m5", "trn1", "trn2", "p5", "g5", "g6", "g6e", "m7i", "inf2")
_WHOLE = {
    "Maximum number of instances allowed per SageMaker HyperPod cluster": 20.0,
    "Total number of instances allowed across SageMaker HyperPod clusters": 40.0,
    "Maximum size of EBS volume in GB for a SageMaker HyperPod cluster instance": 16384.0,
}
_SERVICES = {"sagemaker": "Amazon SageMaker", "vpc": "Amazon VPC", "ec2": "Amazon EC2"}
_NETWORK = {
    "vpc": {"VPCs per Region": 5.0, "Internet gateways per Region": 5.0, "Network interfaces per Region": 5000.0},
    "ec2": {"EC2-VPC Elastic IPs": 5.0},
}


def quota(region: Region, name: str) -> float:
    """The applied value; 0 for an instance type that was never requested."""
    return {
        **_WHOLE,
        **_NETWORK["vpc"],
        **_NETWORK["ec2"],
        **{f"{instance_type} for cluster usage": float(count) for instance_type, count in _APPLIED.items()},
        **{f"{instance_type} for training job usage": 4.0 for instance_type in _OF_JOBS},
        **region.world.scenario.quotas,
    }.get(name, 2.0 if name.endswith(" for endpoint usage") else 0.0)


def _names(service: str) -> list[str]:
    if service in _NETWORK:
        return sorted(_NETWORK[service])
    model = get_service_model("sagemaker")
    of_clusters = [f"{kind} for cluster usage" for kind in model.shape_for("ClusterInstanceType").enum]
    of_jobs = [
        f"{kind} for {usage} usage"
        for kind in model.shape_for("TrainingInstanceType").enum
        for usage in ("training job", "spot training job", "training warm pool")
        if kind.split(".")[1] in _FAMILIES
    ]
    of_endpoints = [
        f"{kind} for endpoint usage"
        for kind in model.shape_for("ProductionVariantInstanceType").enum
        if kind.split(".")[1] in _FAMILIES
    ]
    return sorted([*of_clusters, *of_jobs, *of_endpoints]) + sorted(_WHOLE)


def _describe(region: Region, service: str, name: str) -> dict[str, Any]:
    code = f"L-{hashlib.sha256(name.encode()).hexdigest()[:8].upper()}"
    return {
        "ServiceCode": service,
        "ServiceName": _SERVICES[service],
        "QuotaArn": f"arn:aws:servicequotas:{region.name}:{ACCOUNT}:{service}/{code}",
        "QuotaCode": code,
        "QuotaName": name,
        "Value": quota(region, name),
        "Unit": "None",
        "Adjustable": True,
        "GlobalQuota": False,
    }


@operation("service-quotas", "ListServiceQuotas")
def list_service_quotas(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    service = _service(request)
    names = _names(service)
    first, size = int(request.get("NextToken") or 0), request.get("MaxResults", 100)
    page: dict[str, Any] = {"Quotas": [_describe(region, service, name) for name in names[first : first + size]]}
    if first + size < len(names):
        page["NextToken"] = str(first + size)
    return page


@operation("service-quotas", "ListAWSDefaultServiceQuotas")
def list_aws_default_service_quotas(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    return list_service_quotas(region, request)


def _service(request: dict[str, Any]) -> str:
    if request["ServiceCode"] not in _SERVICES:
        raise AwsError("NoSuchResourceException", f"This stand-in has the quotas of {', '.join(_SERVICES)} only")
    return str(request["ServiceCode"])
