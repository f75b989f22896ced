"""What every AWS account has and moto lacks: a managed policy, newer instance types in some zones, and AWS's images."""

import functools
import json
from typing import Any

from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS
from moto.iam.aws_managed_policies import aws_managed_policies_data
from moto.iam.models import AWSManagedPolicy, iam_backends

from tests.aws.wire import AwsError, operation
from tests.aws.world import ACCOUNT, Region

_POLICIES = ("AmazonSageMakerClusterInstanceRolePolicy",)
# Where AWS offers the types that moto's older table lacks.
_OFFERED = {"us-west-2": {"trn2.48xlarge": ["usw2-az4"], "trn2.3xlarge": ["usw2-az4"]}}


@functools.cache
def _documents() -> dict[str, str]:
    known = json.loads(aws_managed_policies_data)
    return {name: json.dumps(known[name]["Document"]) for name in _POLICIES}


def add_managed_policies() -> None:
    """Called after each reset of moto, which has the policies' documents but can only load all of them or none."""
    for name, document in _documents().items():
        policy = AWSManagedPolicy(name, ACCOUNT, "us-east-1", document=document)
        iam_backends[ACCOUNT]["aws"].managed_policies[policy.arn] = policy


def offer_newer_types() -> None:
    """Called once: moto never resets this table."""
    for region, types in _OFFERED.items():
        for instance_type, zones in types.items():
            for kind, places in (("availability-zone-id", zones), ("region", [region])):
                INSTANCE_TYPE_OFFERINGS[kind][region] += [
                    {"InstanceType": instance_type, "Location": place, "LocationType": kind} for place in places
                ]


@operation("ecr", "BatchGetImage")
def batch_get_image(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    """moto's in one's own account. Of any other, such as AWS's, every image exists."""
    registry = request.get("registryId", ACCOUNT)
    if registry == ACCOUNT:
        ecr = region.client("ecr")
        try:
            return {"images": ecr.batch_get_image(**request)["images"]}
        except ecr.exceptions.RepositoryNotFoundException as error:
            raise AwsError("RepositoryNotFoundException", str(error)) from None
    names = {"registryId": registry, "repositoryName": request["repositoryName"]}
    return {"images": [names | {"imageId": image} for image in request["imageIds"]]}
