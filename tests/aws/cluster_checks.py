"""Requests that HyperPod refuses, by ValidationException or ResourceLimitExceeded, though its model allows them.

The model's own rules (enums, patterns, ranges) have already been checked by wire.py."""

from collections import Counter
from typing import Any

from tests.aws.quotas import quota
from tests.aws.wire import AwsError
from tests.aws.world import Region


def invalid(message: str) -> AwsError:
    return AwsError("ValidationException", message)


def check_groups(region: Region, groups: list[dict[str, Any]], request: dict[str, Any]) -> None:
    names = [group["InstanceGroupName"] for group in groups]
    if len(set(names)) < len(names):
        raise invalid(f"Instance group names must be unique: {', '.join(sorted(names))}")
    slurm = "Slurm" in request.get("Orchestrator", {})
    for group in groups:
        if "InstanceType" not in group:
            raise invalid(f"Instance group {group['InstanceGroupName']} has no InstanceType")
        _check_lifecycle(region, group, optional=slurm)
        check_role(region, group["ExecutionRole"])
        _check_volumes(group, request)
    if "VpcConfig" in request:
        _check_network(region, request["VpcConfig"])
    if slurm:
        _check_slurm(groups)


def check_quotas(region: Region, wanted: Counter[str]) -> None:
    """`wanted`: nodes of all clusters after this request, by instance type."""
    for instance_type, count in wanted.items():
        name = f"{instance_type} for cluster usage"
        if count > (limit := quota(region, name)):
            raise AwsError(
                "ResourceLimitExceeded",
                f"The account-level service limit '{name}' is {limit:.0f} Instances, with current utilization of 0 "
                f"Instances and a request delta of {count} Instances. Please use AWS Service Quotas to request an "
                "increase for this quota. If AWS Service Quotas is not available, contact AWS support to request an "
                "increase for this quota.",
            )


def _check_lifecycle(region: Region, group: dict[str, Any], *, optional: bool) -> None:
    lifecycle = group.get("LifeCycleConfig")
    if not lifecycle:
        if optional:
            return
        raise invalid(f"Instance group {group['InstanceGroupName']} has no LifeCycleConfig")
    uri = lifecycle.get("SourceS3Uri", "")
    if not uri.startswith("s3://sagemaker-"):
        raise invalid(f"The S3 bucket of lifecycle scripts must start with s3://sagemaker-: {uri}")
    scripts = [lifecycle[key] for key in ("OnCreate", "OnInitComplete") if key in lifecycle]
    if not scripts:
        raise invalid("LifeCycleConfig needs OnCreate or OnInitComplete")
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    s3 = region.client("s3")
    for script in scripts:
        key = f"{prefix.rstrip('/')}/{script}".lstrip("/")
        try:
            s3.head_object(Bucket=bucket, Key=key)
        except s3.exceptions.ClientError:
            raise invalid(f"Unable to access lifecycle script s3://{bucket}/{key}: it does not exist") from None


def check_role(region: Region, arn: str) -> None:
    """Raises AwsError for an execution role that SageMaker could not assume."""
    iam = region.client("iam")
    try:
        role = iam.get_role(RoleName=arn.rpartition("/")[2])["Role"]
    except iam.exceptions.NoSuchEntityException:
        raise invalid(f"Could not assume role {arn}: it does not exist") from None
    services = [
        service
        for statement in role["AssumeRolePolicyDocument"]["Statement"]
        for service in _listed(statement["Principal"].get("Service", []))
    ]
    if "sagemaker.amazonaws.com" not in services:
        raise invalid(
            f"Could not assume role {arn}. Please ensure that the role exists and allows principal "
            "'sagemaker.amazonaws.com' to assume the role."
        )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _check_volumes(group: dict[str, Any], request: dict[str, Any]) -> None:
    """Of the documentation of ClusterEbsVolumeConfig, and AWS's page about customer managed keys."""
    volumes = [each["EbsVolumeConfig"] for each in group.get("InstanceStorageConfigs", []) if "EbsVolumeConfig" in each]
    for volume in volumes:
        if volume.get("RootVolume") and ("VolumeSizeInGB" in volume or "VolumeKmsKeyId" not in volume):
            raise invalid("The root volume takes VolumeKmsKeyId and no VolumeSizeInGB")
        if not volume.get("RootVolume") and "VolumeSizeInGB" not in volume:
            raise invalid("A volume needs VolumeSizeInGB")
        if "VolumeKmsKeyId" in volume and request.get("NodeProvisioningMode") != "Continuous":
            raise invalid("Customer managed keys are supported with NodeProvisioningMode Continuous only")


def _check_network(region: Region, place: dict[str, Any]) -> None:
    ec2 = region.client("ec2")
    try:
        subnets = ec2.describe_subnets(SubnetIds=place["Subnets"])["Subnets"]
        groups = ec2.describe_security_groups(GroupIds=place["SecurityGroupIds"])["SecurityGroups"]
    except ec2.exceptions.ClientError as error:
        raise invalid(error.response["Error"]["Message"]) from None
    if len({found["VpcId"] for found in [*subnets, *groups]}) > 1:
        raise invalid("Subnets and security groups must belong to one VPC")


def _check_slurm(groups: list[dict[str, Any]]) -> None:
    kinds = {group["InstanceGroupName"]: group.get("SlurmConfig", {}).get("NodeType") for group in groups}
    if None in kinds.values():
        raise invalid("With Orchestrator.Slurm, every instance group needs a SlurmConfig")
    controllers = [group for group in groups if kinds[group["InstanceGroupName"]] == "Controller"]
    if len(controllers) != 1 or controllers[0]["InstanceCount"] != 1:
        raise invalid("A Slurm cluster needs exactly one Controller instance group, with one instance")
    for group in groups:
        if group.get("MinInstanceCount", 0) > group["InstanceCount"]:
            raise invalid("MinInstanceCount must not be greater than InstanceCount")
        if group["SlurmConfig"].get("PartitionNames") and group["SlurmConfig"]["NodeType"] != "Compute":
            raise invalid("PartitionNames are for Compute instance groups only")
