"""The operations on training jobs: what each refuses and returns. moto completes jobs at once and runs nothing."""

from typing import Any

from tests.aws.cluster_checks import check_role, invalid
from tests.aws.role_access import may, types_of
from tests.aws.training_jobs import ENDED, TrainingJob, find
from tests.aws.wire import AwsError, operation
from tests.aws.world import Region

_WITHOUT_DISKS = ("c5", "c7i", "m5", "m7i")  # families


@operation("sagemaker", "CreateTrainingJob")
def create_training_job(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    name = request["TrainingJobName"]
    if name in region.training_jobs:
        raise AwsError(
            "ResourceInUse",
            "Training job names must be unique within an AWS account and region, and a training job with this name"
            f" already exists ({region.training_jobs[name].arn})",
        )
    for required in ("AlgorithmSpecification", "ResourceConfig", "StoppingCondition"):
        if required not in request:
            raise invalid(f"{required} is required")
    check_role(region, request["RoleArn"])
    _check_types(request)
    _check_stopping(request)
    _check_channels(region, request)
    _check_quota(region, request["ResourceConfig"])
    return {"TrainingJobArn": TrainingJob(region, request).arn}


def _check_types(request: dict[str, Any]) -> None:
    resources = request["ResourceConfig"]
    if ("InstanceType" in resources) == ("InstancePreferences" in resources):
        raise invalid("Specify either InstanceType or InstancePreferences")
    if "InstancePreferences" in resources and request.get("EnableManagedSpotTraining"):
        raise invalid("InstancePreferences is mutually exclusive with EnableManagedSpotTraining")
    if "VolumeSizeInGB" not in resources and any(kind.split(".")[1] in _WITHOUT_DISKS for kind in types_of(resources)):
        raise invalid("An instance type without instance storage needs VolumeSizeInGB")


def _check_stopping(request: dict[str, Any]) -> None:
    stopping = request["StoppingCondition"]
    spot = request.get("EnableManagedSpotTraining", False)
    if spot != ("MaxWaitTimeInSeconds" in stopping) or (
        spot and stopping["MaxWaitTimeInSeconds"] < stopping.get("MaxRuntimeInSeconds", 86400)
    ):
        raise invalid(
            "Invalid MaxWaitTimeInSeconds. It must be present for managed spot training and be greater than or equal to"
            " MaxRuntimeInSeconds"
        )
    stopping.setdefault("MaxRuntimeInSeconds", 86400)


def _check_channels(region: Region, request: dict[str, Any]) -> None:
    channels = request.get("InputDataConfig", [])
    names = [channel["ChannelName"] for channel in channels]
    if len(names) != len(set(names)):
        raise invalid("Duplicate channel names in InputDataConfig")
    for channel in channels:
        if system := channel["DataSource"].get("FileSystemDataSource"):
            if "VpcConfig" not in request:
                raise invalid("VpcConfig is required for a training job with a file system data source")
            if channel.get("InputMode", request["AlgorithmSpecification"]["TrainingInputMode"]) != "File":
                raise invalid("File system data sources support only File input mode")
            if system["FileSystemId"] not in region.world.scenario.file_systems:
                raise invalid(f"File system {system['FileSystemId']} does not exist")
        elif source := channel["DataSource"].get("S3DataSource"):
            _check_prefix(region, source["S3Uri"], request["RoleArn"])


def _check_prefix(region: Region, uri: str, role: str) -> None:
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    s3 = region.client("s3")
    try:
        found = s3.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1)["KeyCount"]
    except s3.exceptions.ClientError:
        found = 0
    if not found or not may(region, role, "s3:ListBucket", f"arn:aws:s3:::{bucket}"):
        raise invalid(
            f'No S3 objects found under S3 URL "{uri}" given in input data source. Please ensure that the bucket exists'
            f" in the selected region ({region.name}), that objects exist under that S3 prefix, and that the role"
            f' "{role}" has "s3:ListBucket" permissions on bucket "{bucket}".'
        )


def _check_quota(region: Region, resources: dict[str, Any]) -> None:
    for kind in types_of(resources):
        _check_quota_of(region, kind, resources["InstanceCount"])


def _check_quota_of(region: Region, kind: str, count: int) -> None:
    name = f"{kind} for training job usage"
    used = sum(
        job.request["ResourceConfig"]["InstanceCount"]
        for job in region.training_jobs.values()
        if job.status not in ENDED and types_of(job.request["ResourceConfig"]) == [kind]
    )
    limit = region.world.scenario.quotas.get(name)
    if limit is not None and used + count > limit:
        raise AwsError(
            "ResourceLimitExceeded",
            f"The account-level service limit '{name}' is {limit:.0f} Instances, with current utilization of {used}"
            f" Instances and a request delta of {count} Instances. Please use AWS Service Quotas to request an increase"
            " for this quota.",
        )


@operation("sagemaker", "DescribeTrainingJob")
def describe_training_job(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    return find(region, request["TrainingJobName"]).describe()


@operation("sagemaker", "StopTrainingJob")
def stop_training_job(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    job = find(region, request["TrainingJobName"])
    if job.status != "InProgress":
        raise invalid(f"The request was rejected because the training job is in status {job.status}.")
    job.stop()
    return {}


@operation("sagemaker", "ListTrainingJobs")
def list_training_jobs(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    found = [
        job
        for job in region.training_jobs.values()
        if request.get("NameContains", "") in job.name
        and request.get("StatusEquals", job.status) == job.status
        and job.created.timestamp() >= request.get("CreationTimeAfter", 0)
    ]
    found.sort(key=lambda job: job.name if request.get("SortBy") == "Name" else job.created.isoformat())
    if request.get("SortOrder", "Descending") == "Descending":
        found.reverse()
    token = request.get("NextToken", "0")
    if not token.isdigit():
        raise invalid("The pagination token is invalid")
    first, size = int(token), request.get("MaxResults", 10)
    page = {"TrainingJobSummaries": [job.summary() for job in found[first : first + size]]}
    return page | ({"NextToken": str(first + size)} if first + size < len(found) else {})
